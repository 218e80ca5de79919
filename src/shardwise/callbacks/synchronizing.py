"""Finds operations that let the host wait for the GPU within a step: debug.sync."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.accelerator import look_for_synchronizing


class FindSynchronizing(Callback):
    """Lets torch warn of such operations, or stop at them, from a batch's arrival to its end.

    Between steps the run itself waits where it has to, for instance for a checkpoint.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode  # warn or error

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        look_for_synchronizing(self.mode)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        look_for_synchronizing("default")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        look_for_synchronizing("default")
