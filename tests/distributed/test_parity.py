"""`strategy=` changes memory and speed and nothing else: every strategy equals a plain loop over the global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.parity import (
    BOUNDS,
    CLIP,
    OPTIMIZERS,
    STRATEGIES,
    Cell,
    deviations,
    reference,
    run_cells,
    some_cells,
)
from tests.harness.processes import spawn

RANKS = (1, 2, 4)
Results = dict[int, list[dict[Cell, dict[str, Any]]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Ranks -> per rank, the results of every cell: one group of processes for each number of ranks."""
    return {
        n: spawn(n, run_cells, tmp_path_factory.mktemp(f"r{n}"), n, some_cells(n), timeout_seconds=400) for n in RANKS
    }


def test_the_cells_hold_what_is_promised() -> None:
    cells = some_cells(2)
    assert {cell.strategy for cell in cells} == set(STRATEGIES)
    for strategy in STRATEGIES:
        own = [cell for cell in cells if cell.strategy == strategy]
        assert {c.optimizer for c in own} == set(OPTIMIZERS) and {c.occasional for c in own} == {True, False}
        assert {(c.accumulate, c.clip) for c in own} == {(1, None), (4, CLIP)}
    for cell in cells:
        assert min(reference(cell.precision, cell.optimizer, cell.clip, cell.occasional)[3]) > 2 * CLIP, "must bite"


def test_each_strategy_once_equals_the_plain_loop(tmp_path: Path) -> None:
    """The short form of what follows: accumulation, clipping, AdamW and weights that not every step needs."""
    cells = [Cell(strategy, "fp32", "adamw", 4, CLIP, True) for strategy in STRATEGIES if "," not in strategy]
    found = spawn(2, run_cells, tmp_path, 2, cells)[0]
    off = {cell.strategy: deviations(cell, found[cell]) for cell in cells}
    assert not {strategy: numbers for strategy, numbers in off.items()
                if max(numbers["update"], numbers["loss"], numbers["gradient_norm"]) > BOUNDS["fp32"]}  # fmt: skip


@pytest.mark.parametrize("ranks", RANKS)
def test_every_strategy_equals_the_plain_loop(runs: Results, ranks: int) -> None:
    """Each tensor's update, and every step's loss and gradient norm."""
    off = {}
    for cell, result in runs[ranks][0].items():
        found = deviations(cell, result)
        if max(found["update"], found["loss"], found["gradient_norm"]) > BOUNDS[cell.precision]:
            off[cell] = found
    assert not off


@pytest.mark.parametrize("ranks", RANKS)
def test_every_rank_ends_with_the_same_weights(runs: Results, ranks: int) -> None:
    for rank, results in enumerate(runs[ranks]):
        for cell, result in results.items():
            for name, tensor in runs[ranks][0][cell]["final"].items():
                assert torch.equal(result["final"][name], tensor), f"rank {rank} disagrees on {name} under {cell}"


def reductions(runs: Results, strategy: str, accumulate: int) -> dict[str, int]:
    """How often gradients are reduced in a step, by kind; sums of scalars (losses, norms) are counted elsewhere."""
    [counts] = [r["collectives"] for cell, r in runs[2][0].items()
                if (cell.strategy, cell.accumulate, cell.occasional) == (strategy, accumulate, False)]  # fmt: skip
    kinds = {"all_reduce", "reduce_scatter", "reduce"} & counts.keys()
    return {kind: counts[kind] for kind in kinds}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp, sync deferred", "fsdp_hybrid, replicas only", "zero1",
                                      "zero1, optimizer offloaded"])  # fmt: skip
def test_gradients_are_reduced_once_a_step(runs: Results, strategy: str) -> None:
    once = reductions(runs, strategy, 1)
    assert once
    assert reductions(runs, strategy, 4) == once


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp, parameters kept", "fsdp_hybrid", "zero2", "zero3"])
def test_gradients_are_reduced_in_every_micro_batch(runs: Results, strategy: str) -> None:
    once = reductions(runs, strategy, 1)
    assert once
    assert reductions(runs, strategy, 4) == {kind: 4 * count for kind, count in once.items()}
