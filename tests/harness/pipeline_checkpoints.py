"""Runs in a pipeline that are stopped and resumed, saved elsewhere, or begun with weights of another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from shardwise.config.compose import compose
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.run_dir.files import checkpoint_path
from tests.harness.cells import fit
from tests.harness.exact_resume import unlike
from tests.harness.pipelines import INTERLEAVED, SIZE

STOP, STEPS = 2, 4
LAYOUTS = {
    "pipeline": ["strategy=fsdp", *SIZE],
    "interleaved": ["strategy=fsdp", *SIZE, *INTERLEAVED],
    "pipeline, bf16, ema": ["strategy=fsdp", *SIZE, "precision=bf16", "ema_decay=0.9"],
}


class Drop(nn.Module):
    """Dropout, and averages that it keeps of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.norm = nn.Linear(12, 12), nn.Dropout(0.2), nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.linear(self.norm(x))))


class Drops(LightningModule):
    """Dropout on every stage, and a schedule of its own that looks at what the last stage alone measures. After its
    first step, layers of both stages stop to drop numbers or to be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(6, 12), nn.ModuleList(Drop() for _ in range(4))
        self.last = nn.Linear(12, 3)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.first(batch[0])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.last(x).float(), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 1:
            for layer in (self.layers[0], self.layers[3]):
                layer.drop.eval()
                layer.norm.requires_grad_(False)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("validation/loss", self.loss(batch), sync_dist=True, batch_size=len(batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)
        schedule = {"scheduler": plateau, "interval": "step", "frequency": 1, "monitor": "validation/loss"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Noise(LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(_noise(80, 0), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(_noise(10, 1), batch_size=4)


def _noise(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.arange(count) % 3)


def plan_for(run_dir: Path, layout: str, *words: str) -> Plan:
    run_dir.mkdir(parents=True, exist_ok=True)
    argv = [
        "recipe=custom", "module._target_=tests.harness.pipeline_checkpoints.Drops",
        "data._target_=tests.harness.pipeline_checkpoints.Noise", "+data.batch_size=${micro_batch_size}",
        f"runs_dir={run_dir.parent}", f"name={run_dir.name}", "accelerator=cpu", "devices=2",
        f"max_steps={STEPS}", "global_batch_size=16", "micro_batch_size=4", "validate_every_n_steps=1",
        "checkpoint.monitor=validation/loss", f"checkpoint.save_every_n_steps={STOP}", "log_every_n_steps=1",
    ]  # fmt: skip
    return make_plan(compose([*argv, *LAYOUTS[layout], *words]).jobs[0].config, Host(cuda_devices=0))


def stop_and_resume(folder: Path, layouts: list[str]) -> dict[str, dict[str, Any]]:
    """In each rank: without a stop, and with one after two steps of four; what differs, and the best checkpoint."""
    found = {}
    for layout in layouts:
        home = folder / layout.replace(", ", "-")
        straight = fit(plan_for(home / "straight", layout))
        fit(plan_for(home / "stopped", layout, f"max_steps={STOP}"))
        saved = checkpoint_path(home / "stopped", STOP)
        resumed = fit(plan_for(home / "stopped", layout, f"resume={saved}"))
        dist.barrier()
        kept = [sorted(path.name for path in (home / one / "checkpoints").iterdir()) for one in ("straight", "stopped")]
        best = [(home / one / "checkpoints" / "best.json").read_text() for one in ("straight", "stopped")]
        found[layout] = {"unlike": unlike(straight, resumed), "kept": kept, "best": best, "rates": straight["rates"],
                         "validation": (straight["validation"], resumed["validation"])}  # fmt: skip
    return found
