"""fp16's dynamic loss scale: a step whose gradients overflow is none, on every rank, and the run goes on."""

from __future__ import annotations

import csv
import io
import itertools
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from shardwise.config.compose import compose
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from tests.distributed.foreign import Foreign
from tests.harness.cells import fit
from tests.harness.processes import spawn

STRATEGIES = {
    "ddp": ["strategy=ddp"],
    "fsdp": ["strategy=fsdp"],
    "fsdp_hybrid": ["strategy=fsdp_hybrid", "strategy.shard_size=1"],  # replicas, whose gradients are all-reduced
}
LR = 0.05
WINDOWS = 5  # of two micro-batches; the third overflows
BATCH = 8


class Overflowing(Foreign):
    """On rank 1 the gradient of one element overflows, once. Under fsdp that element is on rank 0."""

    def __init__(self, overflow_at: int = -1) -> None:
        super().__init__(lr=LR)
        self.overflow_at, self.calls = overflow_at, 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        one = self.head.bias[0].float()
        factor = 1e8 if self.calls == self.overflow_at and self.global_rank == 1 else 0.0
        self.calls += 1
        return loss + factor * (one - one.detach())

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Look(Callback):
    """After every window, and at the start."""

    def __init__(self) -> None:
        self.windows: list[dict[str, Any]] = []

    def _note(self, trainer: Any) -> None:
        self.windows.append(
            {
                "step": trainer.global_step,
                "lr": trainer.optimizers[0].param_groups[0]["lr"],
                "scale": trainer.strategy.planned_precision.loss_scale,
                "samples": trainer.strategy.train_loader.consumed,
                "skipped": trainer.strategy.step.verdict.skipped_steps,
                "weights": trainer.strategy.sharded.full_parameters(),
            }
        )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._note(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % 2 == 0:
            self._note(trainer)


def plan_for(run_dir: Path, *words: str) -> Plan:
    run_dir.mkdir(parents=True, exist_ok=True)
    argv = [
        "recipe=custom", "module._target_=tests.distributed.test_loss_scale.Overflowing",
        "data._target_=tests.distributed.foreign.Points", "+data.batch_size=${micro_batch_size}", "precision=fp16",
        f"runs_dir={run_dir.parent}", f"name={run_dir.name}", "accelerator=cpu", "devices=2", "micro_batch_size=2",
        f"global_batch_size={BATCH}", f"max_steps={WINDOWS - 1}", "checkpoint.save_every_n_steps=3",
        "checkpoint.monitor=null", "validate_every_n_steps=1000", "log_every_n_steps=1",
    ]  # fmt: skip
    return make_plan(compose([*argv, *words]).jobs[0].config, Host(cuda_devices=0))


def run_all(folder: Path) -> dict[str, dict[str, Any]]:
    """In each rank, under every strategy: a run that overflows once, and one that goes on from its checkpoint."""
    cells = {}
    for name, words in STRATEGIES.items():
        look, resumed, out = Look(), Look(), io.StringIO()
        with redirect_stdout(out):
            cell = fit(plan_for(folder / name, *words, "+module.overflow_at=4"), look)
        checkpoint = folder / name / "checkpoints" / "step-00000003.ckpt"
        fit(plan_for(folder / f"{name}-resumed", *words, f"resume={checkpoint}"), resumed)
        cells[name] = {**cell, "windows": look.windows, "resumed": resumed.windows, "out": out.getvalue()}
    return cells


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("loss_scale")
    return folder, spawn(2, run_all, folder)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_skips_the_step_that_overflows_on_one(runs: Any, strategy: str) -> None:
    for cells in runs[1]:
        windows = cells[strategy]["windows"]
        assert [w["step"] for w in windows] == [0, 1, 2, 2, 3, 4]
        assert [w["skipped"] for w in windows] == [0, 0, 0, 1, 1, 1]
        assert [w["lr"] for w in windows] == pytest.approx([LR / 2 ** w["step"] for w in windows])
        assert [w["scale"] for w in windows] == [2.0**16] * 3 + [2.0**15] * 3
        assert [w["samples"] for w in windows] == [BATCH * n for n in range(WINDOWS + 1)]
        unchanged = [same(a["weights"], b["weights"]) for a, b in itertools.pairwise(windows)]
        assert unchanged == [False, False, True, False, False]
        assert all(t.isfinite().all() for w in windows for t in w["weights"].values())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_skipped_step_is_told(runs: Any, strategy: str) -> None:
    folder, results = runs
    told = [line for line in results[0][strategy]["out"].splitlines() if line.startswith("step 3 skipped")]
    assert told == ["step 3 skipped: its gradients are not finite; the loss scale is 32768 now"]
    assert "1 step whose gradients were not finite" in results[0][strategy]["out"]
    assert "skipped" not in results[1][strategy]["out"]
    summary = json.loads((folder / strategy / "summary.json").read_text())
    assert (summary["skipped_steps_this_process"], summary["steps"], summary["samples"]) == (1, 4, 5 * BATCH)
    with (folder / strategy / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4], "each step once"
    assert [float(row["train/samples"]) for row in rows] == [BATCH * n for n in (1, 2, 4, 5)]
    assert all(0 < float(row[f"train/{key}"]) < 100 for row in rows for key in ("loss", "gradient_norm"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_loss_scale_is_resumed(runs: Any, strategy: str) -> None:
    for cells in runs[1]:
        expected, resumed = cells[strategy]["windows"][-2:], cells[strategy]["resumed"]
        assert len(resumed) == 2
        for ours, theirs in zip(resumed, expected, strict=True):
            assert same(ours.pop("weights"), theirs["weights"])
            assert {**ours, "skipped": 1} == {k: v for k, v in theirs.items() if k != "weights"}


def test_strategies_agree(runs: Any) -> None:
    cells = runs[1][0]
    for name in STRATEGIES:
        assert cells[name]["losses"] == pytest.approx(cells["ddp"]["losses"], rel=1e-3), name
