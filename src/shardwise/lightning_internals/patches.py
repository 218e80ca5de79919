"""What is replaced on a Trainer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.lightning_internals.loops import OneStepABatch, ResumingLoop, WindowLoop
from shardwise.lightning_internals.results import StepLogging, StepResults, step_logging
from shardwise.plan import Plan


def count_in_steps(trainer: Trainer, plan: Plan) -> None:
    """Put these into a Trainer that has not started."""
    trainer._logger_connector = StepLogging(trainer)
    step_logging(trainer).start(trainer, plan)
    trainer.fit_loop.__class__, trainer.fit_loop.epoch_loop.__class__ = ResumingLoop, WindowLoop
    trainer.fit_loop.epoch_loop._results = StepResults()
    trainer.fit_loop.epoch_loop.manual_optimization = OneStepABatch(trainer)


def before_epoch_ends(trainer: Trainer, work: Callable[[], Any]) -> None:
    """`work` is done before an epoch that training stops in is counted as a whole one."""
    assert isinstance(trainer.fit_loop, ResumingLoop)
    trainer.fit_loop.leaving_epoch = work


class StoppableTrainer(Trainer):
    """Remembers who set `should_stop`: a callback or the module."""

    _should_stop = False
    _stopper: Any = None

    @property
    def should_stop(self) -> bool:
        return self._should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value and not self._should_stop:
            self._stopper = sys._getframe(1).f_locals.get("self")
        self._should_stop = bool(value)


def early_stop(trainer: Trainer) -> dict[str, Any] | None:
    """At which step training stopped before its planned end, who stopped it and why; None where it did not."""
    if not isinstance(trainer, StoppableTrainer) or not trainer.should_stop or trainer._stopper is None:
        return None
    who = trainer._stopper
    reason = getattr(who, "stopping_reason_message", None)  # EarlyStopping's
    name = type(who).__name__
    return {
        "step": trainer.global_step,
        "by": name if isinstance(who, (Callback, LightningModule)) else f"should_stop, set in {name}",
        "reason": None if reason is None else " ".join(reason.removesuffix("Signaling Trainer to stop.").split()),
    }
