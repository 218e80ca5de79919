"""Tells the watchdog where this rank is."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.plan import Plan
from shardwise.process.watchdog import progress
from shardwise.run_dir.files import trained_mark


class Heartbeat(Callback):
    """Reports a position (steps made, micro-batch, …) and an activity in words: see `Progress.at`."""

    def __init__(self, plan: Plan) -> None:
        self.run_dir, self.micro_batches = plan.run_dir, plan.accumulate_grad_batches

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step, micro = trainer.global_step, batch_idx % self.micro_batches
        progress.at(f"step {step + 1}, micro-batch {micro + 1} of {self.micro_batches}", step, micro, 0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, micro = trainer.global_step, batch_idx % self.micro_batches
        ended = micro + 1 == self.micro_batches
        if ended:
            progress.end_setup()
        if ended and not progress.trained:
            progress.note_step()
            if trainer.is_global_zero:
                with suppress(OSError):  # a folder that cannot be written to is reported at the next save
                    trained_mark(self.run_dir).touch()
        progress.at(f"step {step + 1}, waiting for data", step, -1 if ended else micro, 1)

    def _evaluating(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        activity = f"batch {batch_idx + 1} of evaluation after step {trainer.global_step}"
        progress.at(activity, trainer.global_step, -1, 2 + dataloader_idx, batch_idx)

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _evaluating

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        progress.doing("the end of training")
