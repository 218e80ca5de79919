"""Callbacks of single options: `ema_decay`, `freeze`, garbage collection at one step, `debug.sync`."""

from __future__ import annotations

import gc
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from shardwise.accelerator import look_for_synchronizing
from shardwise.plan import Plan
from shardwise.strategies.base import strategy_of
from shardwise.weights.initialize import frozen_names

# Keeps an exponential moving average of the weights (`ema_decay=`): each rank averages the parts that it holds.


class WeightAverage(Callback):
    """Updates the average after every step that changed the weights. Evaluation uses it, training never does.

    Every checkpoint holds the average beside the weights that training goes on with: the strategy saves and loads it
    as `average`.
    """

    def __init__(self, plan: Plan) -> None:
        assert plan.ema_decay is not None
        self.plan, self.decay = plan, plan.ema_decay
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = strategy_of(trainer)
        strategy.sharded.begin_average()
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:  # the window has not ended, or its step was skipped
            return
        self._step = trainer.global_step
        strategy = strategy_of(trainer)
        if not pl_module.automatic_optimization and not strategy.step.has_stepped:
            return
        sharded, skipped = strategy.sharded, strategy.step.verdict.step_skipped
        assert sharded.average is not None
        masters = sharded.averaged_shards()
        if masters:  # a rank may hold no part of a small model
            averages = [sharded.average[name] for name in masters]
            if isinstance(skipped, Tensor):  # only the device knows yet whether the step is skipped
                moves = torch._foreach_sub(list(masters.values()), averages)
                torch._foreach_mul_(moves, (1 - self.decay) * (1 - skipped))
                torch._foreach_add_(averages, moves)
            elif not skipped:
                torch._foreach_lerp_(averages, list(masters.values()), 1 - self.decay)

    def _swap(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exchange the weights and the average."""
        strategy = strategy_of(trainer)
        if strategy.sharded.average is not None:
            strategy.exchange_average()

    on_validation_start = on_test_start = on_predict_start = _swap
    on_validation_end = on_test_end = on_predict_end = _swap


# Keeps the parts that `freeze=` names frozen, and lets them be trained after `freeze_epochs=`.


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


# Collects Python's garbage at the same step on all ranks, since each of them waits for the one that collects.

_DEFAULT_THRESHOLD = gc.get_threshold()  # when this process began
_NEVER = 2**30  # of the collections of the middle generation


class GarbageCollection(Callback):
    """Makes Python's full collections at every `gc_every_n_steps`-th step, and only there.

    The collections of young objects, which are short, go on as Python likes, so that a step's garbage does not pile up.
    What exists when training starts is left out of all collections until its end: looking through it would take most of
    their time. Where the user's own code has changed the collector, nothing is done.
    """

    ends_step = True  # it is called after every other callback and the module: see lightning_internals/hooks.py

    def __init__(self, plan: Plan, every: int) -> None:
        self.plan, self.every = plan, every
        self.is_ours = False
        self._last_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = trainer.global_step
        self.is_ours = gc.isenabled() and gc.get_threshold() == _DEFAULT_THRESHOLD and gc.get_freeze_count() == 0
        if not self.is_ours:
            return
        # What the set-up has left may hold memory of the device, and could not be freed later. It is freed on GPUs
        # alone: the collection takes half a second.
        gc.collect(1 if self.plan.accelerator == "cpu" else 2)
        gc.freeze()
        young, middle, _ = _DEFAULT_THRESHOLD
        gc.set_threshold(young, middle, _NEVER)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self.is_ours and step != self._last_step and step % self.every == 0:
            gc.collect()
        self._last_step = step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()

    def _end(self) -> None:
        if self.is_ours:
            self.is_ours = False
            gc.unfreeze()
            if gc.get_threshold()[2] == _NEVER:  # nobody has set another one meanwhile
                gc.set_threshold(*_DEFAULT_THRESHOLD)


# Finds operations that let the host wait for the GPU within a step: debug.sync.


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
