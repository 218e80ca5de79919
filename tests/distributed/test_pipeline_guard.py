"""In a pipeline the guard comes to the weights of one process, on every stage; so does an average of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.pipeline_guard import BATCH, run_average, run_guard
from tests.harness.processes import spawn
from tests.harness.selected import needed

PIPELINES = ["pipeline", "interleaved"]


@pytest.fixture(scope="module")
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    cells = sorted(needed(request, "layout", "kind") or set())
    alone = sorted({("one", kind) for _, kind in cells})
    folder = tmp_path_factory.mktemp("guard")
    return spawn(2, run_guard, folder, cells), spawn(1, run_guard, folder, alone)[0]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@pytest.mark.parametrize("layout", PIPELINES)
@pytest.mark.parametrize(("kind", "skipped"), [("loss", 3), ("loss-fp16", 2), ("gradient", 3), ("leap", 37)])
def test_a_skipped_step_is_skipped_by_every_stage(guarded: Any, layout: str, kind: str, skipped: int) -> None:
    """The last stage alone knows the loss, and the gradient that is not a number is in the first.

    In fp16 the first window overflows, so that no step is made; the third is step 2. Its loss says to each stage that
    it is not the loss scale.
    """
    ranks, expected = [rank[layout, kind] for rank in guarded[0]], guarded[1]["one", kind]
    last = max(expected["weights"])
    assert same(expected["weights"][skipped], expected["weights"][skipped - 1])
    assert not same(expected["weights"][last], expected["weights"][skipped])
    for step in range(1, last + 1):
        assert all(same(rank["weights"][step], expected["weights"][step]) for rank in ranks)
        # Each stage has the buffers of its own layers
        assert same(ranks[0]["buffers"][step] | ranks[1]["buffers"][step], expected["buffers"][step])


@pytest.mark.parametrize("layout", PIPELINES)
@pytest.mark.parametrize("kind", ["loss", "gradient", "leap", "stopped"])
def test_what_is_told_is_what_one_process_tells(guarded: Any, layout: str, kind: str) -> None:
    ranks, alone = [rank[layout, kind] for rank in guarded[0]], guarded[1]["one", kind]
    [told], [expected] = ranks[0]["noted"], alone["noted"]
    for word in ("what", "action", "step", "samples_consumed_before"):
        assert told[word] == expected[word], word
    samples = [[m["samples"] for rank in row["ranks"] for m in rank["micro_batches"]] for row in (told, expected)]
    assert samples[0] == samples[1]
    names = [{name for rank in row["ranks"] for name in rank["parameters"]} for row in (told, expected)]
    assert names[0] == names[1]
    assert _guard_lines(ranks[0]["out"]) == _guard_lines(alone["out"]) and not _guard_lines(ranks[1]["out"])


@pytest.mark.parametrize("layout", PIPELINES)
@pytest.mark.parametrize("kind", ["stopped"])
def test_a_step_that_stops_the_run_stops_every_stage(guarded: Any, layout: str, kind: str) -> None:
    errors = {rank[layout, kind]["error"].replace(f"/{layout}/", "/one/") for rank in guarded[0]}
    assert errors == {guarded[1]["one", kind]["error"]} and "step-00000002.ckpt" in errors.pop()


@pytest.mark.parametrize("layout", PIPELINES)
@pytest.mark.parametrize("kind", ["rollback"])
def test_a_leap_rolls_every_stage_back(guarded: Any, layout: str, kind: str) -> None:
    ranks, expected = [rank[layout, kind] for rank in guarded[0]], guarded[1]["one", kind]
    for rank in ranks:
        assert rank["pass_over"] == expected["pass_over"] == (36 * BATCH,)
        assert same(rank["final"], expected["final"])
        assert rank["groups"] == 0, "a run that is rolled back made its groups anew"
    assert "step 37: its window is passed over" in ranks[0]["out"]


def test_an_average_is_that_of_one_process(tmp_path: Path) -> None:
    ranks, one = spawn(2, run_average, tmp_path, PIPELINES), spawn(1, run_average, tmp_path, ["one"])[0]["one"]
    assert len(one["seen"]) == 1 and not same(one["seen"][0], one["final"])
    for layout in PIPELINES:
        for rank in ranks:
            assert same(rank[layout]["seen"][0], one["seen"][0])
            assert same(rank[layout]["resumed"][0], one["seen"][0])
            assert same(rank[layout]["final"], one["final"])
            assert rank[layout]["validation"] == one["validation"]
        # A start and a validation give a stage the buffers of its own layers, not those of rank 0
        assert same(ranks[0][layout]["buffers"] | ranks[1][layout]["buffers"], one["buffers"])


def _guard_lines(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("guard: ")]
