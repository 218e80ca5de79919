"""Runs a validation again that was cut short, since the run ended between a save and the end of the validation."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.trainer import call


def validate_now(trainer: Trainer) -> None:
    """Validate when training starts, as the loop over batches would do later."""
    loop, connector = trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector
    first = connector._first_loop_iter
    loop.restarting, trainer.validating = False, True
    call._call_lightning_module_hook(trainer, "on_validation_model_zero_grad")  # as the loop over batches does
    loop.run()
    connector._first_loop_iter, trainer.training = first, True
