"""Obeys signals at the same step on all ranks, and tells the watchdog where this rank is."""

from __future__ import annotations

import signal
from collections import deque
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.callbacks.guard import Guard
from shardwise.callbacks.saving import Saving
from shardwise.distributed.mesh import sum_over
from shardwise.errors import Left
from shardwise.plan import Plan
from shardwise.process.signals import in_words, install_handlers, signal_requests
from shardwise.process.watchdog import progress
from shardwise.protocols import optional
from shardwise.run_dir.files import trained_mark
from shardwise.step.record import LAG, Readback
from shardwise.strategies.base import strategy_of

# Obeys signals: save and leave, or save and go on. All ranks obey at the same step, whichever got the signal.


class GracefulStop(Callback):
    """Saves, and ends the run where a signal asks for it.

    A rank's requests travel with the step's numbers, which are summed over the ranks anyway and are read some steps
    later, at the same step on every rank. So no step waits, and no collective is added.
    """

    ends_step = True  # it is called after every other callback and the module: see lightning_internals/hooks.py

    def __init__(self, plan: Plan, guard: Guard, saving: Saving) -> None:
        self.plan, self.guard, self.saving = plan, guard, saving
        self.unread: deque[Readback] = deque()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        install_handlers()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.plan.accumulate_grad_batches:
            return
        if self.guard.save:
            self.guard.end_save_request()
            self.guard.read_all(trainer)
            saved = self.saving.save_now(trainer, leaves=False)
            if trainer.is_global_zero:
                print(f"asked by a signal: {saved}, and goes on", flush=True)
        if self.guard.leave and trainer.global_step != self.plan.max_steps:
            self.guard.read_all(trainer)
            self._leave(trainer)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, _: int = 0
    ) -> None:
        """Leave without waiting for the end of validation: a run that goes on begins with it."""
        if trainer.state.fn != "fit" or self.saving.before_validation is None:
            return
        device = trainer.strategy.root_device
        requests = torch.full((), signal_requests.take_as_number(), dtype=torch.float64, device=device)
        sum_over(strategy_of(trainer).mesh.group("world"), requests)
        self.unread.append(Readback(requests.reshape(1)))
        if len(self.unread) > LAG:
            self._read()
        if self.guard.leave and trainer.global_step != self.plan.max_steps:
            if strategy_of(trainer).sharded.exchanged:  # during validation the weights are the average
                strategy_of(trainer).exchange_average()
            self._leave(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        while self.unread:
            self._read()

    def _read(self) -> None:
        (total,) = self.unread.popleft().read()
        self.guard.add_signal_requests(total)

    def _leave(self, trainer: Trainer) -> None:
        number = signal_requests.leave
        by = in_words(number) if number else "a signal to another rank"
        saved = self.saving.save_now(trainer, leaves=True)
        for logger in trainer.loggers:
            if (leaves := optional(logger, "leaves")) is not None:
                leaves()
        unsaved_by = None if self.plan.checkpoint.saves else number or signal.SIGTERM
        raise Left(f"stopped by {by}: {saved}", self.plan.goes_on_by, unsaved_by)


# Tells the watchdog where this rank is.


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
