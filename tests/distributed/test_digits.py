"""The image recipe, BatchNorm and all, under every strategy in fp32 and bf16: one run, whatever shards it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.config.compose import compose
from shardwise.plan import Host
from shardwise.plan.resolve import make_plan
from tests.harness.cells import fit
from tests.harness.processes import spawn

STEPS = 3
STRATEGIES = ["ddp", "fsdp", "fsdp_hybrid", "zero1", "zero2", "zero3"]


class Layout(Callback):
    """Whether the convolutions' weights, where they are whole, lie as the images do."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        weights = [p for p in pl_module.parameters() if p.ndim == 4 and p.shape[1] > 1]
        self.channels_last = all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)


def run_all(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    cells = {}
    for precision in ("fp32", "bf16"):
        for strategy in STRATEGIES:
            run_dir = folder / f"{strategy}-{precision}"
            run_dir.mkdir(parents=True, exist_ok=True)
            argv = [
                "recipe=image_classification", f"strategy={strategy}", f"precision={precision}", f"name={run_dir.name}",
                f"runs_dir={folder}", "accelerator=cpu", "devices=2", "micro_batch_size=16", "global_batch_size=32",
                f"max_steps={STEPS}", f"validate_every_n_steps={STEPS}", "max_validation_batches=2", "checkpoint=none",
                "log_every_n_steps=1", "module.mixup_alpha=0.2", "schedule.warmup_steps=1", "module.channels_last=true",
            ]  # fmt: skip
            hybrid = ["strategy.shard_size=2"] if strategy == "fsdp_hybrid" else []
            layout, config = Layout(), compose([*argv, *hybrid]).jobs[0].config
            cells[strategy, precision] = fit(make_plan(config, Host(cuda_devices=0)), layout)
            cells[strategy, precision]["channels_last"] = layout.channels_last
    return cells


def test_digits_are_learned_alike_under_every_strategy(tmp_path: Path) -> None:
    cells = spawn(2, run_all, tmp_path)[0]
    for (strategy, precision), cell in cells.items():
        first, bound = cells["ddp", precision], 1e-4 if precision == "fp32" else 2e-2
        where = f"{strategy} in {precision}"
        assert cell["hash"] == cells["ddp", "fp32"]["hash"], where
        assert cell["channels_last"] or strategy != "ddp", where
        assert cell["losses"][-1] < cell["losses"][0], where
        assert cell["losses"] == pytest.approx(first["losses"], rel=bound), where
        assert cell["norms"] == pytest.approx(first["norms"], rel=5 * bound), where
        assert cell["validation"]["validation/loss"] == pytest.approx(first["validation"]["validation/loss"], rel=bound)
        for name, buffer in cell["buffers"].items():
            deviation = (buffer.double() - first["buffers"][name].double()).norm()
            assert deviation <= bound * first["buffers"][name].double().norm().clamp(min=1), f"{where}: {name}"
