"""The callbacks of a run, in the one order, with the reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lightning.pytorch import Callback, Trainer

from shardwise.callbacks.average import WeightAverage
from shardwise.callbacks.configured import build_callbacks
from shardwise.callbacks.guard import Guard
from shardwise.callbacks.heartbeat import Heartbeat
from shardwise.callbacks.learning_rate import LearningRateFinder
from shardwise.callbacks.leaving import GracefulStop
from shardwise.callbacks.saving import Saving
from shardwise.callbacks.steps import StepLog
from shardwise.callbacks.summary import Summary
from shardwise.plan import Plan


@dataclass(frozen=True)
class RunCallbacks:
    """`all`: in the order in which they are called. `own`: the user's among them."""

    all: list[Callback]
    own: list[Callback]
    before_epoch_ends: Callable[[Trainer], None]  # before an epoch that training stops in is counted as a whole one


def build_run_callbacks(plan: Plan, *first: Callback) -> RunCallbacks:
    """The user's callbacks and the run's. `first` come before all others."""
    log, saving, own = StepLog(plan), Saving(plan), build_callbacks(plan)
    guard = Guard(plan, log, saving)
    ordered: list[Callback] = [*first]
    if plan.ema_decay is not None:
        ordered.append(WeightAverage(plan))  # before all that save: what is saved is what it has put back
    ordered += own  # the user's see a step before the run's own act on it
    ordered.append(Heartbeat(plan))
    ordered.append(guard)  # before the log and the saving: they see no step that it has not passed
    ordered += [log, saving, Summary(plan, log, saving)]
    if plan.find_learning_rate:
        ordered.append(LearningRateFinder(plan))
    ordered.append(GracefulStop(plan, guard, saving))  # last: everybody else has seen the step
    return RunCallbacks(ordered, own, partial(_save_before_epoch_ends, guard, saving))


def _save_before_epoch_ends(guard: Guard, saving: Saving, trainer: Trainer) -> None:
    """Training stops within an epoch: once that is counted as a whole one, a run that goes on could not end it."""
    guard.read_all(trainer)
    saving.save_within_epoch(trainer)
