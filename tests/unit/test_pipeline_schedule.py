"""Pipeline schedules: idle time and memory are those of the papers, and nobody waits for ever."""

import dataclasses
import itertools

import pytest

from shardwise.errors import ConfigError
from shardwise.plan.pipeline_schedule import (
    Action,
    DeadlockError,
    Schedule,
    make_schedule,
    most_kept,
    schedule_notice,
    simulate,
)

LAYOUTS = [
    *itertools.product(("gpipe", "1f1b"), (1, 2, 3, 4, 8), (1,), (1, 2, 3, 4, 8, 9)),
    *(("interleaved", ranks, chunks, ranks * n) for ranks in (1, 2, 3, 4, 8) for chunks in (2, 3) for n in (1, 2, 3)),
]


def words(schedule: Schedule) -> list[str]:
    return [" ".join(f"{a.kind}{a.stage}.{a.micro_batch}" for a in own) for own in schedule]


def test_the_lists_are_those_that_the_papers_draw() -> None:
    assert words(make_schedule("gpipe", 2, 1, 2)) == ["F0.0 F0.1 B0.0 B0.1", "F1.0 F1.1 B1.0 B1.1"]
    assert words(make_schedule("1f1b", 3, 1, 4)) == [
        "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
        "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3",
        "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3",
    ]
    assert words(make_schedule("interleaved", 2, 2, 2)) == [
        "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1",
    ]


@pytest.mark.parametrize(("name", "ranks", "chunks", "micro_batches"), LAYOUTS)
def test_idle_time_and_memory_are_those_of_the_papers(name: str, ranks: int, chunks: int, micro_batches: int) -> None:
    line = simulate(make_schedule(name, ranks, chunks, micro_batches))
    assert line.bubble == pytest.approx((ranks - 1) / (chunks * micro_batches))
    assert line.idle == pytest.approx((ranks - 1) / (chunks * micro_batches + ranks - 1))
    kept = {
        "gpipe": lambda position: micro_batches,
        "1f1b": lambda position: ranks - position,
        "interleaved": lambda position: 2 * (ranks - position - 1) + (chunks - 1) * ranks + 1,
    }[name]
    assert line.kept == tuple(min(kept(position), chunks * micro_batches) for position in range(ranks))


@pytest.mark.parametrize(("name", "ranks", "chunks", "micro_batches"), LAYOUTS)
def test_a_stage_takes_the_micro_batches_in_their_order(name: str, ranks: int, chunks: int, micro_batches: int) -> None:
    """Gradients then add up as they do without a pipeline."""
    for position, own in enumerate(make_schedule(name, ranks, chunks, micro_batches)):
        for stage, kind in itertools.product(range(position, ranks * chunks, ranks), "FB"):
            taken = [a.micro_batch for a in own if (a.stage, a.kind) == (stage, kind)]
            assert taken == list(range(micro_batches))
        assert len(own) == 2 * chunks * micro_batches


def test_the_numbers_of_the_papers_one_by_one() -> None:
    found = [simulate(make_schedule(*layout)) for layout in (("1f1b", 4, 1, 8), ("1f1b", 4, 1, 32))]
    assert [round(line.bubble, 3) for line in found] == [0.375, 0.094]
    assert [round(line.idle, 3) for line in found] == [0.273, 0.086]
    half = simulate(make_schedule("interleaved", 4, 2, 8))
    assert (half.bubble, round(half.idle, 3), half.kept) == (0.1875, 0.158, (11, 9, 7, 5))
    assert simulate(make_schedule("gpipe", 4, 1, 8)).total == 33.0  # 11 slots of a forward and a backward


def test_unequal_stages_wait_for_the_slowest() -> None:
    """8 B in four stages: the head is 2.4 layers' worth."""
    times = []
    for layers in ([8.0, 8.0, 8.0, 10.4], [9.0, 9.0, 8.0, 8.4]):
        line = simulate(make_schedule("1f1b", 4, 1, 32), layers, [2 * cost for cost in layers])
        assert line.busy == pytest.approx([32 * 3 * cost for cost in layers])
        times.append(round(1 + line.bubble, 2))
    assert times == [1.30, 1.13]


def test_a_schedule_that_never_ends_is_refused_with_the_actions() -> None:
    first, second = make_schedule("1f1b", 2, 1, 2)
    swapped = (first[0], first[2], first[1], first[3])  # B0 before F1, which position 1 wants before its B0
    late = (second[0], second[2], second[1], second[3])
    with pytest.raises(DeadlockError) as error:
        simulate((swapped, late))
    assert str(error.value) == (
        "this schedule never ends: position 0 waits before B0 of stage 0 for B0 of stage 1; "
        "position 1 waits before F1 of stage 1 for F1 of stage 0"
    )


def test_a_receiver_that_wants_another_order_is_found() -> None:
    first, second = make_schedule("gpipe", 2, 1, 2)
    other = (second[1], second[0], *second[2:])
    with pytest.raises(DeadlockError, match="position 0 sends for F0 of stage 1.*position 1 waits for what F1 of"):
        simulate((first, other))


def test_an_action_that_is_missing_or_on_another_position_is_found() -> None:
    first, second = make_schedule("1f1b", 2, 1, 2)
    with pytest.raises(DeadlockError, match="position 1 must run once, and does not: B1 of stage 1"):
        simulate((first, second[:-1]))
    with pytest.raises(DeadlockError, match="position 0 must run once, and does not: F0 of stage 1"):
        simulate((second, first))


def test_what_is_kept_is_counted_over_the_stages_of_a_position() -> None:
    assert most_kept(()) == 0
    assert most_kept((Action("F", 0, 0), Action("F", 2, 0), Action("B", 2, 0), Action("F", 0, 1))) == 2


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "micro_batches", "expected"),
    [
        (
            "1f2b",
            2,
            1,
            2,
            r"pipeline_schedule=1f2b: there is no such schedule \(did you mean 1f1b\?\); there is gpipe,",
        ),
        ("1f1b", 2, 2, 2, "pipeline_chunks=2: 1f1b has one stage a rank; use pipeline_chunks=1, or .*=interleaved"),
        ("gpipe", 2, 3, 2, "pipeline_chunks=3: gpipe has one stage a rank"),
        (
            "interleaved",
            2,
            1,
            2,
            "pipeline_chunks=1: interleaved needs at least 2 stages a rank; use pipeline_chunks=2",
        ),
        ("interleaved", 4, 2, 6, "multiple of pipeline_parallel_size=4, and there are 6; use 4 or 8 of them"),
        ("interleaved", 4, 2, 3, "and there are 3; use 4 of them .global_batch_size., or pipeline_schedule=1f1b"),
        ("1f1b", 0, 1, 2, "pipeline_parallel_size=0: must be at least 1"),
        ("1f1b", 2, 0, 2, "pipeline_chunks=0: must be at least 1"),
        ("1f1b", 2, 1, 0, "micro-batches of a step=0: must be at least 1"),
    ],
)
def test_what_cannot_be_is_one_message(name: str, ranks: int, chunks: int, micro_batches: int, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        make_schedule(name, ranks, chunks, micro_batches)


def test_fewer_micro_batches_than_ranks_work_and_are_told() -> None:
    assert schedule_notice(4, 4) is None
    assert (schedule_notice(4, 1) or "").startswith("1 micro-batch in a step for 4 ranks of a pipeline")
    assert simulate(make_schedule("1f1b", 4, 1, 1)).idle == 0.75


def test_an_action_is_a_frozen_record() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Action("F", 0, 0).stage = 1  # type: ignore[misc]
    assert str(Action("B", 2, 7)) == "B7 of stage 2"
