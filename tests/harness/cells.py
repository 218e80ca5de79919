"""One training run under one strategy, in ranks that already exist: many cells share a group of processes."""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shardwise.callbacks.summary import Summary
from shardwise.config.compose import compose
from shardwise.distributed.mesh import init_process_group
from shardwise.parallel.precision import set_matmul_mode
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.rank import quiet_lightning
from shardwise.trainer import build_data, build_module, build_trainer

TINY = [
    "model.vocab_size=61", "model.dim=24", "model.n_layers=3", "model.n_heads=2", "model.n_kv_heads=1",
    "model.ffn_dim=41", "model.max_seq_len=16", "model.tie_embeddings=true", "module.sample_tokens=0",
    "data=custom", "data._target_=tests.harness.cells.MaskedTokens", "data.batch_size=${micro_batch_size}",
    "checkpoint.monitor=null",
    "checkpoint.save_every_n_steps=null", "log_every_n_steps=1", "validate_every_n_steps=1000",
]  # fmt: skip


class MaskedTokens(LightningDataModule):
    """Sequences whose share of valid targets differs widely, so that a mean of means is wrong."""

    def __init__(self, batch_size: int, samples: int = 50) -> None:
        super().__init__()
        self.batch_size, self.samples = batch_size, samples

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(masked_tokens(self.samples), batch_size=self.batch_size)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(masked_tokens(13, seed=1), batch_size=2)  # type: ignore[arg-type]


def masked_tokens(samples: int, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(samples):
        tokens = torch.randint(0, 61, (17,), generator=generator)
        targets = tokens[1:].clone()
        targets[: i * 5 % 16] = -100
        rows.append({"tokens": tokens[:-1], "targets": targets})
    return rows


def cell_plan(run_dir: Path, ranks: int, *overrides: str, accelerator: str = "cpu") -> Plan:
    command = compose([*TINY, f"runs_dir={run_dir.parent}", f"name={run_dir.name}", f"accelerator={accelerator}",
                       f"devices={ranks}", *overrides])  # fmt: skip
    run_dir.mkdir(parents=True, exist_ok=True)
    return make_plan(command.jobs[0].config, Host(cuda_devices=torch.cuda.device_count()))


class Capture(Callback):
    """The full master weights before the first step, and their hash with the buffers."""

    whole_weights_in = ()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start = trainer.strategy.sharded.full_parameters()
        self.hash = state_hash(self.start, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.final = trainer.strategy.sharded.full_parameters()


def state_hash(parameters: dict[str, Tensor], module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in [*parameters.items(), *module.named_buffers()]:
        digest.update(name.encode() + tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def fit(plan: Plan, *callbacks: Callback) -> dict[str, Any]:
    """Fit `plan` in this rank: start and final parameters, logged losses and gradient norms, validation."""
    quiet_lightning()
    set_matmul_mode(plan.precision)
    if not torch.distributed.is_initialized():
        init_process_group(plan)
    module, capture = build_module(plan), Capture()
    trainer = build_trainer(plan, module)
    trainer.callbacks.extend([capture, *callbacks])  # type: ignore[attr-defined]
    with patch("shardwise.callbacks.summary.plot_losses", return_value=None):  # half of the time of such a run
        trainer.fit(module, datamodule=build_data(plan), ckpt_path=plan.resume, weights_only=True)
    rows = list(csv.DictReader((Path(plan.run_dir) / "metrics.csv").open())) if trainer.is_global_zero else []
    return {
        "start": capture.start,
        "hash": capture.hash,
        "final": capture.final,
        "buffers": {name: buffer.cpu() for name, buffer in module.named_buffers()},
        "losses": [float(r["train/loss"]) for r in rows if r.get("train/loss")],
        "rates": [float(r["train/learning_rate"]) for r in rows if r.get("train/learning_rate")],
        "norms": [float(r["train/gradient_norm"]) for r in rows if r.get("train/gradient_norm")],
        "validation": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "parameters": [one.parameters for one in trainer.callbacks if isinstance(one, Summary)],  # type: ignore[attr-defined]
    }
