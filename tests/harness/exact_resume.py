"""A run without a stop beside one that is stopped and resumed, with what makes the same bits hard: dropout, workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from shardwise.config.compose import compose
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from tests.harness.cells import fit

BATCH, STOP, STEPS = 16, 3, 7  # an epoch has five steps
WIDTH = 600  # 1.4 MB a layer: several buckets of 1 or 2 MiB

CONFIGS = {
    "ddp": ["strategy=ddp", "strategy.bucket_cap_mb=2"],
    "ddp, workers, ema, asynchronous": [
        "strategy=ddp", "strategy.bucket_cap_mb=1", "+data.num_workers=2", "ema_decay=0.9", "checkpoint=async",
        "precision=bf16",
    ],
    "fsdp": ["strategy=fsdp", "checkpoint=async"],
    "fsdp, bf16, ema, workers": ["strategy=fsdp", "precision=bf16", "ema_decay=0.9", "+data.num_workers=2"],
    "fsdp_hybrid": ["strategy=fsdp_hybrid", "strategy.shard_size=2", "checkpoint=async"],
    "zero1, bf16": ["strategy=zero1", "precision=bf16"],
    "zero2": ["strategy=zero2", "checkpoint=async"],
    "zero3, bf16, ema": ["strategy=zero3", "precision=bf16", "ema_decay=0.9"],
}  # fmt: skip
CELLS = {2: [name for name in CONFIGS if name not in ("ddp", "fsdp")], 4: ["ddp", "fsdp"]}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.linear(x)))


class Dropping(LightningModule):
    """Dropout, BatchNorm and a schedule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer(), Layer())
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.norm(self.layers(batch[0]))).float(), batch[1])

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Noise(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        row = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return row, index % 3

    def __len__(self) -> int:
        return 5 * BATCH


class NoiseData(LightningDataModule):
    def __init__(self, batch_size: int, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size, self.num_workers = batch_size, num_workers

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Noise(), batch_size=self.batch_size, num_workers=self.num_workers, shuffle=True)


def plan_for(folder: Path, ranks: int, steps: int, *words: str, accelerator: str = "cpu") -> Plan:
    folder.mkdir(parents=True, exist_ok=True)
    argv = [
        "recipe=custom", "module._target_=tests.harness.exact_resume.Dropping",
        "data._target_=tests.harness.exact_resume.NoiseData", "+data.batch_size=${micro_batch_size}",
        f"runs_dir={folder.parent}", f"name={folder.name}", f"accelerator={accelerator}", f"devices={ranks}",
        f"max_steps={steps}", f"global_batch_size={BATCH}", f"micro_batch_size={BATCH // ranks // 2}", *words,
        "checkpoint.monitor=null", f"checkpoint.save_every_n_steps={STOP}", "log_every_n_steps=1",
        "validate_every_n_steps=1000",
    ]  # fmt: skip
    return make_plan(compose(argv).jobs[0].config, Host(cuda_devices=torch.cuda.device_count()))


def run_all(folder: Path, ranks: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """In each rank."""
    found = {}
    for number, name in enumerate(names):
        words = CONFIGS[name]
        found[name] = stopped_and_not(
            folder / f"{number}", lambda run_dir, *more, words=words: plan_for(run_dir, ranks, STEPS, *words, *more)
        )
    return found


def stopped_and_not(folder: Path, make: Callable[..., Plan]) -> dict[str, Any]:
    """In each rank: without a stop, and with one: up to a checkpoint, and on from it."""
    straight = fit(make(folder / "straight"))
    fit(make(folder / "stopped", f"max_steps={STOP}"))
    resumed = fit(make(folder / "stopped", f"resume={folder / 'stopped' / 'checkpoints' / f'step-{STOP:08d}.ckpt'}"))
    dist.barrier()
    return {"straight": straight, "resumed": resumed}


def unlike(straight: dict[str, Any], resumed: dict[str, Any]) -> list[str]:
    """What is not the same bits in one rank: rows of metrics.csv (rank 0), weights, buffers."""
    found = [kind for kind in ("losses", "norms", "rates") if resumed[kind] != straight[kind]]
    for kind in ("final", "buffers"):
        found += [
            f"{kind} {key}" for key, tensor in straight[kind].items() if not torch.equal(resumed[kind][key], tensor)
        ]
    return found
