"""Tells the watchdog where this rank is."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.launch.watchdog import progress
from shardwise.plan import Plan


class Heartbeat(Callback):
    """Places are (steps made, micro-batch, …): see `Progress.place`."""

    def __init__(self, plan: Plan) -> None:
        self.micro_batches = plan.accumulate_grad_batches

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step, micro = trainer.global_step, batch_idx % self.micro_batches
        progress.at(f"step {step + 1}, micro-batch {micro + 1} of {self.micro_batches}", step, micro, 0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, micro = trainer.global_step, batch_idx % self.micro_batches
        ended = micro + 1 == self.micro_batches
        progress.settled = progress.settled or ended
        progress.at(f"step {step + 1}, waiting for data", step, -1 if ended else micro, 1)

    def _evaluating(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        words = f"batch {batch_idx + 1} of evaluation after step {trainer.global_step}"
        progress.at(words, trainer.global_step, -1, 2 + dataloader_idx, batch_idx)

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _evaluating

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        progress.doing("the end of training")
