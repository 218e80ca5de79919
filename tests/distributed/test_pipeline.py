"""A pipeline changes memory and speed alone: against one process, whose parity with a plain loop has tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.pipelines import (
    ADAMW,
    INTERLEAVED,
    SGD,
    SIZE,
    drawn,
    drawn_after_a_stop,
    drawn_after_shards,
    run,
    run_counting,
    run_halving,
    run_stack,
    run_stacks,
)
from tests.harness.processes import spawn

GPIPE = ["strategy.pipeline_schedule=gpipe"]
UNTIED, FP64, FP32 = ["model.tie_embeddings=false"], ["precision=fp64"], ["precision=fp32"]
FULL = ["activation_checkpointing=full"]
HYBRID = ["strategy=fsdp_hybrid", "strategy.shard_size=1"]
BOUNDS = {"fp64": 1e-12, "fp32": 1e-4}

Result = dict[str, Any]


def one_process(folder: Path, cells: list[list[str]]) -> list[Result]:
    found: list[Result] = spawn(1, run, folder / "one", 1, cells)[0]
    return found


def check(own: Result, other: Result, bound: float) -> None:
    """The same start; updates, losses, norms and validation that deviate by at most `bound`."""
    assert own["start"].keys() == other["start"].keys() and own["validation"].keys() == other["validation"].keys()
    for name, start in other["start"].items():
        assert torch.equal(own["start"][name], start), name
        final = other["final"][name]
        update = (final - start).double().norm().item()  # of a frozen weight 0
        # Where an update is much smaller than the weight, the weight's last bit is more than `bound` of it.
        last_bit = torch.finfo(final.dtype).eps * final.abs().max().item() if update else 0.0
        assert (own["final"][name] - final).double().norm().item() <= bound * update + last_bit, name
    for key in ("losses", "norms"):
        assert own[key] == pytest.approx(other[key], rel=bound, abs=0) and own[key], key
    assert own["validation"] == pytest.approx(other["validation"], rel=bound)
    assert own["parameters"] == other["parameters"]


def check_ranks(results: list[list[Result]]) -> None:
    """All ranks end with the same weights (a shared one on both ends of the pipeline) and metrics."""
    for rank in results[1:]:
        for own, first in zip(rank, results[0], strict=True):
            assert own["validation"] == pytest.approx(first["validation"], rel=1e-12)
            assert all(torch.equal(own["final"][name], tensor) for name, tensor in first["final"].items())


def test_two_stages_equal_one_process(tmp_path: Path) -> None:
    """Eight micro-batches a step, clipping, masks of uneven size, a validation whose last batch is smaller, and of the
    average of the weights, one of which both ends share."""
    cells = [[*FP64, *ADAMW, "ema_decay=0.5"], [*FP64, *SGD, *FULL], [*FP64, *ADAMW, *UNTIED]]
    words = [*GPIPE], [], [*INTERLEAVED]
    results = spawn(2, run, tmp_path / "two", 2, [[*c, *SIZE, *w] for c, w in zip(cells, words, strict=True)])
    for own, other in zip(results[0], one_process(tmp_path, cells), strict=True):
        check(own, other, BOUNDS["fp64"])
    check_ranks(results)


def test_each_schedule_equals_one_process(tmp_path: Path) -> None:
    cells = [[*FP64, *ADAMW, *more] for more in ([], UNTIED)] + [[*FP64, *SGD, *FULL]]
    words = (GPIPE, [], INTERLEAVED, ["strategy.defer_gradient_sync=true"], ["strategy.pipeline_split=[1,3]"])
    results = spawn(2, run, tmp_path / "two", 2, [[*c, *SIZE, *w] for c in cells for w in words], timeout_seconds=400)
    expected = one_process(tmp_path, cells)
    for number, own in enumerate(results[0]):
        check(own, expected[number // len(words)], BOUNDS["fp64"])
    check_ranks(results)


def test_fp32_gives_the_same_bits(tmp_path: Path) -> None:
    """Without a clip, which knows the norm, nothing is added in another order: no weight is shared by both ends."""
    cell = [*FP32, *ADAMW, *UNTIED, "gradient_clip_val=null"]
    words = (GPIPE, [], INTERLEAVED, FULL)
    results = spawn(2, run, tmp_path / "two", 2, [[*cell, *SIZE, *w] for w in words])[0]
    [expected] = one_process(tmp_path, [cell])
    for own in results:
        assert all(torch.equal(own["final"][name], tensor) for name, tensor in expected["final"].items())
        assert own["validation"] == expected["validation"]


def test_weights_that_stay_gathered_are_gathered_once_a_step(tmp_path: Path) -> None:
    """Each stage of four layers over two ranks has two of them, and what is outside. Four micro-batches a step."""
    cell, stay = [*FP32, *ADAMW, *UNTIED, *SIZE, "gradient_clip_val=0.1"], ["strategy.reshard_after_forward=false"]
    defer = "strategy.defer_gradient_sync=true"
    words = ([], stay, [*stay, *FULL], [*stay, *INTERLEAVED], [*stay, defer], [*stay, defer, *INTERLEAVED])
    results = spawn(4, run_counting, tmp_path / "four", 4, [[*cell, *w] for w in words])
    usual = results[0][0]
    for rank in results:
        assert [own["calls"] for own in rank] == [2 * 2 * 4 + 4, 3, 3, 3, 3, 3]
    for own in results[0][1:]:
        check(own, usual, BOUNDS["fp32"])
    assert all(torch.equal(results[0][1]["final"][name], tensor) for name, tensor in usual["final"].items())


def test_gradients_that_no_rank_shares_are_handed_over_once_a_step(tmp_path: Path) -> None:
    """Those of two layers, and of what is outside."""
    cells = [[*FP32, *ADAMW, *SIZE, *words] for words in ([], INTERLEAVED)]
    for rank in spawn(2, run_counting, tmp_path / "two", 2, cells, "foreach_reduce"):
        assert [own["calls"] for own in rank] == [3, 3]


def test_each_stage_reduces_its_own_gradients(tmp_path: Path) -> None:
    """In each of four micro-batches those of two layers, and of what is outside."""
    cells = [[*FP32, *ADAMW, *SIZE, *words] for words in ([], INTERLEAVED)]
    for rank in spawn(4, run_counting, tmp_path / "four", 4, cells, "foreach_reduce"):
        assert [own["calls"] for own in rank] == [12, 12]


def test_gradients_are_handed_over_where_the_last_backward_pass_has_nothing_to_do(tmp_path: Path) -> None:
    """Stages that are frozen, or that no gradient reaches in the last micro-batch."""
    layouts = [], INTERLEAVED, [*INTERLEAVED, "strategy.defer_gradient_sync=true"]
    cells = [(module, words) for module in ("FrozenStart", "FrozenEnd", "EndsWithoutGradients") for words in layouts]
    found = spawn(2, run_stacks, tmp_path / "two", cells)[0]
    one = ["devices=1", "strategy.pipeline_parallel_size=1"]
    twice = ["global_batch_size=8"]
    alone = [*((module, one) for module, _ in cells[:: len(layouts)]), ("EndsWithoutGradients", [*one, *twice])]
    expected = spawn(1, run_stacks, tmp_path / "one", alone)[0]
    for number, own in enumerate(found):
        check(own, expected[number // len(layouts)], BOUNDS["fp64"])
    hybrid = ["devices=4", "strategy=fsdp_hybrid", *twice]
    more = [("EndsWithoutGradients", [*hybrid, f"strategy.shard_size={shards}", *words])
            for shards in (1, 2) for words in layouts[:2]]  # fmt: skip
    for own in spawn(4, run_stacks, tmp_path / "four", more)[0]:
        check(own, expected[-1], BOUNDS["fp64"])


@pytest.mark.parametrize("module", ["Halves", "HalvesInHooks"])
def test_who_changes_gradients_after_each_micro_batch_does(tmp_path: Path, module: str) -> None:
    stay = ["strategy.reshard_after_forward=false"]
    found = spawn(2, run_halving, tmp_path, module, [[], stay, INTERLEAVED, [*stay, *INTERLEAVED]])[0]
    one = ["devices=1", "strategy.pipeline_parallel_size=1"]
    [alone] = spawn(1, run_halving, tmp_path / "one", module, [one])[0]
    check(found[0], alone, BOUNDS["fp32"])
    for usual, own in (found[:2], found[2:]):  # interleaved, a hook comes after each stage
        assert own["losses"] == usual["losses"]
        assert all(torch.equal(own["final"][name], tensor) for name, tensor in usual["final"].items())


def test_stages_that_are_sharded_or_copied(tmp_path: Path) -> None:
    cells = [[*FP64, *ADAMW], [*FP32, *SGD, *UNTIED]]
    more = ([], HYBRID, [*HYBRID, *INTERLEAVED], ["strategy.pipeline_parallel_size=4"])
    results = spawn(4, run, tmp_path / "four", 4, [[*c, *SIZE, *w] for c in cells for w in more],
                    timeout_seconds=400)  # fmt: skip
    expected = one_process(tmp_path, cells)
    for number, own in enumerate(results[0]):
        check(own, expected[number // len(more)], BOUNDS["fp64" if number < len(more) else "fp32"])
    check_ranks(results)


@pytest.mark.parametrize(("before", "after"), [("pipeline", "one"), ("one", "pipeline"), ("pipeline", "interleaved")])
def test_a_run_goes_on_with_another_layout(tmp_path: Path, before: str, after: str) -> None:
    """Saved after two steps of four; the names, the optimizer's state and its description are the whole module's."""
    layouts = {"one": (1, []), "pipeline": (2, SIZE), "interleaved": (2, [*SIZE, *INTERLEAVED])}
    saving = [*FP64, *ADAMW, "checkpoint=default", "checkpoint.save_every_n_steps=2", "checkpoint.monitor=null"]
    (ranks, words), (then, others) = layouts[before], layouts[after]
    spawn(ranks, run, tmp_path / "saved", ranks, [[*saving, *words, "max_steps=2", "schedule=none"]])
    saved = tmp_path / "saved" / "0" / "checkpoints" / "step-00000002.ckpt"
    [went_on] = spawn(then, run, tmp_path / "on", then, [[*saving, *others, f"resume={saved}", "max_steps=4",
                                                          "schedule=none"]])[0]  # fmt: skip
    [whole] = spawn(1, run, tmp_path / "whole", 1, [[*FP64, *ADAMW, "max_steps=4", "schedule=none"]])[0]
    for name, tensor in whole["final"].items():
        update = (tensor - whole["start"][name]).norm()
        assert float((went_on["final"][name] - tensor).norm() / update) <= BOUNDS["fp64"], name


REFUSALS = {
    "Between": "is not given what layers.0 gave: the module computes between the two",
    "Twice": "first is defined before the layers that repeat and runs behind them: .* one pass",
    "Conditioned": "is given a second tensor that needs gradients",
    "Early": "late is defined behind the layers that repeat and runs before them",
    "Leaves": "layers.3 ran where layers.2 had to run next",
    "Counts": "codes gives numbers of torch.int64, and this stage of the pipeline does not have these numbers",
    "Collects": "the loss is computed from what a layer gives or has that is on another stage of the pipeline",
    "Teaches": "argmax looks at what a layer of another stage gives or has, and this stage of the pipeline does not",
    "Vector": r"training_step returned a loss of shape \(2,\): it must be a scalar",
    "Tuples": "gives tuple, and a pipeline hands over one tensor",
}


@pytest.mark.parametrize("module", REFUSALS)
def test_what_a_pipeline_cannot_run_is_refused(tmp_path: Path, module: str) -> None:
    """Never a number that is wrong. A rank that refuses ends, and the launcher ends the others."""
    with pytest.raises(AssertionError, match=f"ConfigError: ({module}: .*)?{REFUSALS[module]}"):
        spawn(2, run_stack, tmp_path, module)


def test_a_loss_for_each_sample_is_refused_without_a_pipeline(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=f"ConfigError: {REFUSALS['Vector']}"):
        spawn(2, run_stack, tmp_path, "Vector", ["strategy.pipeline_parallel_size=1"])


@pytest.mark.parametrize("module", ["Stack", "Likens"])
def test_a_module_of_ones_own_runs(tmp_path: Path, module: str) -> None:
    spawn(2, run_stack, tmp_path, module)


@pytest.mark.parametrize("words", [[], INTERLEAVED])
def test_what_a_step_draws_is_the_same_on_every_stage(tmp_path: Path, words: list[str]) -> None:
    """Else the first stage would mask other tokens than those that the last one compares. Layers draw other numbers."""
    own, other = spawn(2, drawn, tmp_path, *words)
    for key in ("hook", "step", "python"):
        assert own[key] == other[key] and len(set(own[key])) == 4, key  # two steps of two micro-batches
    stages = [number for found in (own, other) for key, number in found.items() if key.isdigit()]
    numbers = [number for stage in stages for number in stage]
    assert len(stages) == 4 and len(set(numbers)) == len(numbers) == 16


def test_pipelines_beside_each_other_draw_other_numbers(tmp_path: Path) -> None:
    """Ranks 0 and 2 are one pipeline, 1 and 3 another one, which has other samples."""
    ranks = spawn(4, drawn, tmp_path, "devices=4", "global_batch_size=8")
    for key in ("hook", "step", "python"):
        assert ranks[0][key] == ranks[2][key] and ranks[1][key] == ranks[3][key], key
        assert len({*ranks[0][key], *ranks[1][key]}) == 8, key
    numbers = [number for rank in ranks for key, numbers in rank.items() if key.isdigit() for number in numbers]
    assert len(set(numbers)) == len(numbers) == 32


def test_pipelines_beside_each_other_go_on_drawing_after_a_stop(tmp_path: Path) -> None:
    """Each rank takes up the streams of its own pipeline and what it has logged itself, in the middle of an epoch."""
    ranks = spawn(4, drawn_after_a_stop, tmp_path, "devices=4", "global_batch_size=8")
    for rank, (straight, resumed) in enumerate(ranks):
        assert straight.pop("logged") == resumed.pop("logged"), rank
        assert resumed == {key: numbers[len(numbers) // 2 :] for key, numbers in straight.items()}, rank


def test_stages_draw_alike_after_a_checkpoint_of_ranks_that_did_not(tmp_path: Path) -> None:
    own, other = spawn(2, drawn_after_shards, tmp_path)
    for key in ("hook", "step", "python"):
        assert own[key] == other[key] and len(set(own[key])) == 2, key
