"""Collects Python's garbage at the same step on all ranks, since each of them waits for the one that collects."""

from __future__ import annotations

import gc
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.plan import Plan

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
