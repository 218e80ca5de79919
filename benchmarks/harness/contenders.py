"""Who is compared in overhead.py: a plain loop, stock Lightning and what is here, on the same module and data."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from benchmarks.harness.clock import DataClock
from benchmarks.harness.data import Held
from benchmarks.harness.plain_loops import CLIP, train_language_model, train_module
from benchmarks.harness.trainers import our_trainer, stock_trainer
from shardwise.config.targets import build
from shardwise.plan import Plan
from shardwise.trainer import build_module

FEATURES = 64  # of a row: little to copy to the device
NEVER = 10**6

PLAIN, STOCK, STOCK_LOGGING = "plain loop", "stock Lightning", "stock Lightning, logging every 10"
OURS_LOGGING, OURS = "shardwise, logging every 10", "shardwise, never logging"
UNCLIPPED = "plain loop, no clipping"
EVERY, DEFERRED = "every micro-batch", "deferred"
WATCHING, WATCHING_LLM = "watching host", "watching llm"
WATCHED, UNWATCHED = "with telemetry, verdicts and Prometheus", "without"
LOGGING = (OURS_LOGGING, WATCHED, UNWATCHED)  # every tenth step
WATCHERS = ("TelemetryLog", "Verdicts", "PrometheusExport")
OF_SMALL_STEPS = (PLAIN, STOCK, STOCK_LOGGING, OURS_LOGGING, OURS)
OF_SECTION = {
    "llm": (PLAIN, OURS_LOGGING, UNCLIPPED),  # the two that are compared stand close together
    "sync": (EVERY, DEFERRED),
    WATCHING: (WATCHED, UNWATCHED),
    WATCHING_LLM: (WATCHED, UNWATCHED),
}


class Mlp(LightningModule):
    """A few layers, and an optimizer of its own: the same under every contender."""

    def __init__(self, layers: int, width: int, fused: bool = False) -> None:
        super().__init__()
        sizes = [FEATURES, *[width] * layers]
        self.layers = nn.Sequential(*(layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())))
        self.last = nn.Linear(width, FEATURES)
        self.fused, self.logs = fused, False

    def loss(self, batch: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.layers(batch)).float(), batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.logs:
            self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=self.fused or None)


def stock(plan: Plan, data: Held, clock: DataClock, *, logging: bool) -> None:
    module: Any = build(plan.module, "module")
    module.logs = logging
    if plan.precision.is_low:
        module.fused = False  # its MixedPrecision refuses to clip before a fused optimizer
    logger: Any = False
    if logging:
        from lightning.pytorch.loggers import CSVLogger

        logger = CSVLogger(plan.run_dir)
    stock_trainer(
        plan.accelerator,
        plan.topology.devices,
        plan.run_dir,
        strategy="ddp" if plan.topology.world_size > 1 else "auto",
        precision="bf16-mixed" if plan.precision.is_low else "32-true",
        max_steps=clock.steps,
        gradient_clip_val=CLIP,
        logger=logger,
        log_every_n_steps=10 if logging else NEVER,
    ).fit(module, datamodule=data)


def ours(plan: Plan, data: Held, without: tuple[str, ...] = ()) -> None:
    """What `python train.py` runs from its Plan on. `without`: the callbacks that are left out."""
    module = build_module(plan)
    trainer: Any = our_trainer(plan, module)
    trainer.callbacks = [c for c in trainer.callbacks if type(c).__name__ not in without]
    trainer.strategy.teardown = lambda: None  # it copies weights and state to the CPU
    trainer.fit(module, datamodule=data)


def train(contender: str, plan: Plan, data: Held, clock: DataClock, *, language_model: bool) -> None:
    if contender in (OURS, OURS_LOGGING, EVERY, DEFERRED):
        strategy = replace(plan.strategy, defer_gradient_sync=contender == DEFERRED)
        ours(replace(plan, strategy=strategy), data)
    elif contender in (WATCHED, UNWATCHED):
        exporting = replace(plan, metrics=replace(plan.metrics, prometheus="textfile"))
        ours(exporting, data, WATCHERS if contender == UNWATCHED else ())
    elif contender in (STOCK, STOCK_LOGGING):
        stock(plan, data, clock, logging=contender == STOCK_LOGGING)
    elif language_model:
        train_language_model(plan, data, clock, clip=contender != UNCLIPPED)
    else:
        train_module(plan, data, clock)
