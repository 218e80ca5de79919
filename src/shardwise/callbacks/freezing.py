"""Keeps the parts that `freeze=` names frozen, and lets them be trained after `freeze_epochs=`."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.plan import Plan
from shardwise.weights.freezing import frozen_names


class Freezing(Callback):
    """What is frozen is a function of the epoch alone, so that a run that goes on has it as it was."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._freeze(trainer, pl_module)  # a run that goes on within an epoch does not call the hook below

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._freeze(trainer, pl_module)

    def _freeze(self, trainer: Trainer, module: LightningModule) -> None:
        epochs = self.plan.freeze_epochs
        thawed = epochs is not None and trainer.current_epoch >= epochs
        is_frozen = frozen_names(self.plan, module)
        for name, layer in module.named_modules():
            if is_frozen(name):
                layer.training = thawed
        if epochs is not None:
            for name, parameter in module.named_parameters():
                if is_frozen(name):
                    parameter.requires_grad_(thawed)
