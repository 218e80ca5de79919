"""The axes together: tensor, context and pipeline, with shards and copies, change memory and speed and no number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.utils import counters

from tests.harness.divided import (
    CLIP,
    HEADS,
    HYBRID,
    INTERLEAVED,
    KEYS,
    Divided,
    axis_words,
    deviation,
    run_divided,
    run_saved,
)
from tests.harness.parity import BOUNDS
from tests.harness.processes import spawn
from tests.harness.reference import update_deviation

CHECKPOINTED = ("activation_checkpointing=full", "loss=chunked")
HARD: dict[str, Any] = {"tied": False, "optimizer": "sgd", "more": CHECKPOINTED}

# Four ranks
TWO_AXES = [
    Divided(axis_words(2, 2, 1, KEYS)),
    Divided(axis_words(2, 1, 2, *INTERLEAVED), layers=4, more=CHECKPOINTED),
    Divided(axis_words(1, 2, 2, HEADS), layers=2, tied=False, optimizer="sgd"),
]
MORE_OF_TWO_AXES = [
    Divided(axis_words(2, 2, 1, HEADS), **HARD),
    Divided(axis_words(2, 2, 1, HEADS), precision="fp32", more=("activation_checkpointing=selective",)),
    Divided(axis_words(2, 1, 2), accumulate=8, precision="fp32", **HARD),
    Divided(axis_words(2, 1, 2, "strategy.pipeline_schedule=gpipe"), clip=None),
    Divided(axis_words(1, 2, 2, KEYS, *INTERLEAVED), layers=4, more=CHECKPOINTED),
    Divided(axis_words(1, 2, 2, HEADS, "strategy.defer_gradient_sync=true"), precision="fp32", **HARD),
]
COMPILED = [
    Divided(axis_words(2, 2, 1, HEADS), tied=False, more=("compile=model", *CHECKPOINTED)),
]
# Eight ranks
THREE_AXES = [
    Divided(axis_words(2, 1, 2), data_ranks=2),
    Divided(axis_words(2, 1, 2, *INTERLEAVED), data_ranks=2, layers=4, **HARD),
    Divided(axis_words(2, 2, 2, HEADS)),
    Divided(axis_words(2, 2, 2, KEYS), precision="fp32", **HARD),
    Divided(axis_words(1, 2, 2, HEADS), data_ranks=2, precision="fp32", **HARD),
    Divided((*axis_words(2), *HYBRID), data_ranks=4),
    Divided((*axis_words(1, 1, 2), *HYBRID), data_ranks=4, **HARD),
    Divided(axis_words(2, 2), data_ranks=2, tied=False),
]


def off(
    ranks: int, cells: list[Divided], folder: Path, run: Callable[..., list[dict[str, Any]]] = run_divided
) -> dict[Divided, Any]:
    """The cells that do not equal the plain loop, or whose ranks do not end with the same weights and metrics."""
    found = spawn(ranks, run, folder, ranks, cells, timeout_seconds=400)
    wrong: dict[Divided, Any] = {}
    for number, cell in enumerate(cells):
        first, *others = (result[number] for result in found)
        numbers = deviation(cell, first)
        print(cell, numbers)
        assert cell.clip is None or min(first["norms"]) > 2 * CLIP, "must bite"
        if max(numbers.values()) > BOUNDS[cell.precision]:
            wrong[cell] = numbers
        for other in others:
            assert other["validation"] == first["validation"], cell
            assert all(torch.equal(other["final"][name], tensor) for name, tensor in first["final"].items()), cell
    return wrong


def test_two_axes_equal_the_plain_loop(tmp_path: Path) -> None:
    """Initial weights, losses, norms, updates and validation. The vocabulary of 61 is divided unevenly."""
    assert not off(4, TWO_AXES, tmp_path)


def test_two_axes_equal_the_plain_loop_in_every_way(tmp_path: Path) -> None:
    assert not off(4, MORE_OF_TWO_AXES, tmp_path)


def run_compiled(folder: Path, ranks: int, cells: Sequence[Divided]) -> list[dict[str, Any]]:
    """In each rank: one cell after the other, and none is without a graph."""
    found = []
    for number, cell in enumerate(cells):
        torch._dynamo.reset()
        counters.clear()
        found += run_divided(folder / str(number), ranks, [cell])
        assert counters["stats"]["unique_graphs"] > 0, cell
    return found


def test_a_compiled_step_of_two_axes_equals_the_plain_loop(tmp_path: Path) -> None:
    """With the collectives of both axes in its graphs."""
    assert not off(4, COMPILED, tmp_path, run_compiled)


def test_three_axes_equal_the_plain_loop(tmp_path: Path) -> None:
    assert not off(8, THREE_AXES, tmp_path)


def test_a_parameter_without_a_dimension_sees_what_its_layer_sees(tmp_path: Path) -> None:
    """It is on no shard: part of the sequence, of the samples, or none of them, on each rank."""
    scaled: dict[str, Any] = {"layers": 4, "tied": False, "more": ("module._target_=tests.harness.divided.Scaled",)}
    layouts = [axis_words(2), axis_words(1, 2, 1, KEYS), axis_words(1, 1, 2, *INTERLEAVED)]
    [[expected]] = spawn(1, run_divided, tmp_path / "one", 1, [Divided(("strategy=ddp",), **scaled)])
    cells = [Divided(layout, **scaled) for layout in layouts]
    names = [name for name in expected["start"] if name.endswith("scale.weight")]
    assert len(names) == 4 and not any(torch.equal(expected["start"][n], expected["final"][n]) for n in names)
    for rank in spawn(2, run_divided, tmp_path / "two", 2, cells):
        for own in rank:
            off = update_deviation(expected["start"], own["final"], expected["final"])
            assert max(off.values()) <= BOUNDS["fp64"], off
            assert all(torch.equal(own["start"][name], tensor) for name, tensor in expected["start"].items())
            assert own["norms"] in ([], pytest.approx(expected["norms"], rel=BOUNDS["fp64"]))


def test_micro_batches_of_a_step_may_have_other_lengths(tmp_path: Path) -> None:
    """In a pipeline layers of one are computed again behind the forward pass of the next."""
    more = ("data._target_=tests.harness.divided.OfTwoLengths", *CHECKPOINTED)
    [[expected]] = spawn(1, run_divided, tmp_path / "one", 1, [Divided(("strategy=ddp",), more=more)])
    for [own] in spawn(4, run_divided, tmp_path / "four", 4, [Divided(axis_words(1, 2, 2, KEYS), more=more)]):
        assert max(update_deviation(expected["start"], own["final"], expected["final"]).values()) <= BOUNDS["fp64"]
        assert own["losses"] in ([], pytest.approx(expected["losses"], rel=BOUNDS["fp64"]))


def test_a_run_goes_on_with_other_axes(tmp_path: Path) -> None:
    """A checkpoint has the names and shapes of the whole model; on the same layout a resumed run never stopped."""
    one = Divided(("strategy=ddp",), layers=4)
    stages, parts = Divided(axis_words(2, 1, 2, *INTERLEAVED), layers=4), Divided(axis_words(2, 2, 1, HEADS), layers=4)
    both = Divided(axis_words(1, 2, 2), layers=4)
    runs = [("stages", stages, None), ("stages-again", stages, "stages"), ("parts-from-stages", parts, "stages"),
            ("both-from-one", both, "one"), ("parts", parts, None), ("both-from-parts", both, "parts")]  # fmt: skip
    begun = spawn(1, run_saved, tmp_path, 1, [("one", one, None)])[0]
    four = spawn(4, run_saved, tmp_path, 4, runs)
    back = spawn(1, run_saved, tmp_path, 1, [("from-stages", one, "stages"), ("from-parts", one, "parts")])[0]
    found = {name: deviation(stages, result) for name, result in (begun | four[0] | back).items()}
    assert not {name: numbers for name, numbers in found.items() if max(numbers.values()) > BOUNDS["fp64"]}
    for rank in four:
        straight, resumed = rank["stages"], rank["stages-again"]
        assert resumed["losses"] == straight["losses"][2:] and resumed["norms"] == straight["norms"][2:]
        assert all(torch.equal(resumed["final"][name], tensor) for name, tensor in straight["final"].items())


def broken_runs(folder: Path, faults: dict[str, tuple[Divided, str, str]]) -> list[dict[str, Any]]:
    """In each rank: a run for each fault. A fault is a cell, and what does nothing in it: class and method."""
    found = []
    for number, (cell, owner, method) in enumerate(faults.values()):
        with patch(f"{owner}.{method}", autospec=True, return_value=None):
            found.append(run_divided(folder / str(number), 4, [cell])[0])
    return found


def test_what_is_broken_on_purpose_is_seen(tmp_path: Path) -> None:
    stages = Divided(axis_words(2, 1, 2), optimizer="sgd")
    faults = {
        "norms see a part of the sequence": (
            stages, "shardwise.parallel.tensor_parallel.TensorParallel", "sum_gradients"
        ),
        "a divided weight's norm is of all parts": (
            stages, "shardwise.step.precision_plugin.PlannedPrecision", "divide"
        ),
        "both ends have gradients of a shared weight": (
            stages, "shardwise.strategies.pipeline_run.PipelineRun", "_sum_shared_gradients"
        ),
        "the stages have one norm": (stages, "shardwise.step.precision_plugin.StageNorm", "measure_over"),
    }  # fmt: skip
    found = spawn(4, broken_runs, tmp_path, faults)[0]
    for (name, (cell, *_)), result in zip(faults.items(), found, strict=True):
        numbers = deviation(cell, result)
        assert max(numbers.values()) > 1e-3, f"{name}: {numbers}"
