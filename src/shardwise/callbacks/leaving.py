"""Obeys signals: save and leave, save and go on. Every rank at the same step, whichever of them was told."""

from __future__ import annotations

import signal
from collections import deque
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.callbacks.average import WeightAverage
from shardwise.callbacks.guard import Guard
from shardwise.callbacks.saving import Saving
from shardwise.distributed.collectives import sum_over
from shardwise.errors import Left
from shardwise.plan import Plan
from shardwise.process.signals import asked, in_words, listen
from shardwise.protocols import leaves_of
from shardwise.step.record import LAG, Readback
from shardwise.strategies.base import strategy_of


class GracefulStop(Callback):
    """What a rank was asked for travels with the step's numbers, which are summed over the ranks anyway and are read
    some steps later at the same step everywhere: no wait and no message of its own."""

    ends_step = True  # after every other callback and the module: see lightning_internals/hooks.py

    def __init__(self, plan: Plan, guard: Guard, saving: Saving) -> None:
        self.plan, self.guard, self.saving = plan, guard, saving
        self.unread: deque[Readback] = deque()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        listen()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.plan.accumulate_grad_batches:
            return
        if self.guard.save:
            self.guard.end_save_request()
            self.guard.read_all(trainer)
            told = self.saving.save_now(trainer, leaves=False)
            if trainer.is_global_zero:
                print(f"asked by a signal: {told}, and goes on", flush=True)
        if self.guard.leave and trainer.global_step != self.plan.max_steps:
            self.guard.read_all(trainer)
            self._leave(trainer)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, _: int = 0
    ) -> None:
        """As long as it takes, validation is not waited for: a run that goes on begins with it."""
        if trainer.state.fn != "fit" or self.saving.before_validation is None:
            return
        requests = torch.full((), asked.take(), dtype=torch.float64, device=trainer.strategy.root_device)
        sum_over(strategy_of(trainer).mesh.group("world"), requests)
        self.unread.append(Readback(requests.reshape(1)))
        if len(self.unread) > LAG:
            self._read()
        if self.guard.leave and trainer.global_step != self.plan.max_steps:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, WeightAverage):
                    callback.on_validation_end(trainer, pl_module)  # the weights are the average here
            self._leave(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        while self.unread:
            self._read()

    def _read(self) -> None:
        (total,) = self.unread.popleft().read()
        self.guard.add_signal_requests(total)

    def _leave(self, trainer: Trainer) -> None:
        by = in_words(asked.leave) if asked.leave else "a signal to another rank"
        told = self.saving.save_now(trainer, leaves=True)
        for logger in trainer.loggers:
            if (leaves := leaves_of(logger)) is not None:
                leaves()
        raise Left(f"stopped by {by}: {told}", None if self.plan.checkpoint.saves else asked.leave or signal.SIGTERM)
