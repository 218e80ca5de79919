"""fp16's loss scale is one for all ranks of the tensor, context and pipeline axes: an overflow on one of them skips the
step on all, and gradients are clipped by their true norm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.distributed.tensor import DTensor

from shardwise.distributed.dtensor import local_part
from shardwise.run_dir.files import checkpoint_path
from tests.harness.cells import fit
from tests.harness.divided import CLIP
from tests.harness.layouts import DEEP, layout_plan
from tests.harness.parity import OPTIMIZERS
from tests.harness.processes import spawn

MICRO_BATCHES, WINDOW, SAVED = 2, 3, 3  # of the third window the gradients overflow, once, before step 3
WORDS = (*DEEP, *OPTIMIZERS["sgd"], f"checkpoint.save_every_n_steps={SAVED}", "checkpoint.save_at_end=false")
FSDP = ("fsdp", 1)
STAGES = [("pipeline 2, 1f1b", 0), ("pipeline 2, 1f1b", 1)]
OTHERS = [("pipeline 2, interleaved", 1), ("tensor 2", 0), ("context 2", 1), ("context 2, by heads", 0)]


class Overflows(Callback):
    """Makes one number of one rank's gradients infinite; notes each window."""

    def __init__(self, rank: int) -> None:
        self.rank, self.window = rank, 0
        self.windows: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.window = batch_idx // MICRO_BATCHES + 1

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        gradients = [local_part(p.grad) for p in pl_module.parameters() if isinstance(p.grad, DTensor)]  # of this stage
        if self.window == WINDOW and trainer.global_rank == self.rank and gradients:
            gradients[0].view(-1)[0] = torch.inf

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        if (batch_idx + 1) % MICRO_BATCHES == 0:
            self.windows.append({"step": trainer.global_step, "scale": strategy.planned_precision.loss_scale,
                                 "skipped": strategy.step.verdict.skipped_steps,
                                 "weights": strategy.sharded.full_parameters()})  # fmt: skip


def run_all(folder: Path, cells: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """In each rank, of (layout, rank): a run that overflows on that rank, and one that goes on from its checkpoint."""
    found = []
    for number, (layout, rank) in enumerate(cells):
        look, home = Overflows(rank), folder / str(number)
        result = fit(layout_plan(home, layout, False, *WORDS, precision="fp16"), look)
        words = (*WORDS, f"resume={checkpoint_path(home, SAVED)}")
        resumed = fit(layout_plan(folder / f"{number}-resumed", layout, False, *words, precision="fp16"))
        found.append({**result, "windows": look.windows, "resumed": resumed})
    return found


def check(folder: Path, cells: Sequence[tuple[str, int]]) -> None:
    ranks = spawn(2, run_all, folder, [FSDP, *cells], timeout_seconds=90)
    expected = ranks[0][0]
    assert min(expected["norms"]) > 2 * CLIP, "must bite"
    for number, cell in enumerate([FSDP, *cells]):
        for found in (rank[number] for rank in ranks):
            windows, first = found["windows"], ranks[0][number]
            assert [window["step"] for window in windows] == [1, 2, 2, 3, 4], cell
            assert [window["scale"] for window in windows] == [2.0**16] * 2 + [2.0**15] * 3, cell
            assert [window["skipped"] for window in windows] == [0, 0, 1, 1, 1], cell
            assert same(windows[1], windows[2]) and not same(windows[2], windows[3]), cell
            assert all(same(*pair) for pair in zip(windows, first["windows"], strict=True)), cell
            resumed = found["resumed"]["final"]
            assert all(torch.equal(resumed[name], tensor) for name, tensor in found["final"].items()), cell
        assert first["losses"] == pytest.approx(expected["losses"], rel=1e-4), cell
        assert first["norms"] == pytest.approx(expected["norms"], rel=1e-3), cell


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(tensor, other["weights"][name]) for name, tensor in one["weights"].items())


def test_every_stage_of_a_pipeline_skips_the_step_that_overflows_on_one(tmp_path: Path) -> None:
    check(tmp_path, STAGES)


def test_so_does_every_rank_of_the_other_axes(tmp_path: Path) -> None:
    check(tmp_path, OTHERS)
