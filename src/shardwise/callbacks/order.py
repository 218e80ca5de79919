"""Builds the callbacks of a run in the order in which they are called, with the reasons for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lightning.pytorch import Callback, Trainer

from shardwise.callbacks.configured import build_callbacks
from shardwise.callbacks.guard import Guard
from shardwise.callbacks.profile import Profile
from shardwise.callbacks.saving import KeepTokenizer, Saving
from shardwise.callbacks.signals import GracefulStop, Heartbeat
from shardwise.callbacks.steps import StepLog
from shardwise.callbacks.summary import Summary
from shardwise.callbacks.telemetry import PrometheusExport, TelemetryLog
from shardwise.callbacks.verdicts import Verdicts
from shardwise.plan import Plan


@dataclass(frozen=True)
class RunCallbacks:
    """The callbacks of a run: `all` of them in the order in which they are called, and among them the user's `own`."""

    all: list[Callback]
    own: list[Callback]
    before_epoch_ends: Callable[[Trainer], None]  # called when training stops in an epoch, before that counts as whole


def build_run_callbacks(plan: Plan, *first: Callback) -> RunCallbacks:
    """The user's callbacks and the run's. `first` come before all others."""
    log, saving, own = StepLog(plan), Saving(plan), build_callbacks(plan)
    verdicts = Verdicts(plan, log)
    guard = Guard(plan, log, saving)
    ordered: list[Callback] = [*first, KeepTokenizer(plan)]
    if plan.freeze and plan.stage == "fit":
        from shardwise.callbacks.optional import Freezing

        ordered.append(Freezing(plan))
    if plan.ema_decay is not None:
        from shardwise.callbacks.optional import WeightAverage

        ordered.append(WeightAverage(plan))  # it comes before those that save: it puts the trained weights back first
    if plan.debug.sync != "off":
        from shardwise.callbacks.optional import FindSynchronizing

        ordered.append(FindSynchronizing(plan.debug.sync))
    ordered += own  # the user's callbacks see a step before the run's callbacks act on it
    ordered.append(Heartbeat(plan))
    ordered.append(guard)  # it comes before the log and the saving, which see only steps that it has passed
    telemetry = TelemetryLog(plan, log)
    ordered += [log, telemetry, PrometheusExport(plan, log, telemetry, saving)]
    ordered += [saving, verdicts, Summary(plan, log, saving, telemetry.energy, verdicts)]
    if plan.gc_every_n_steps is not None:
        from shardwise.callbacks.optional import GarbageCollection

        ordered.append(GarbageCollection(plan, plan.gc_every_n_steps))
    if plan.find_learning_rate:
        from shardwise.callbacks.learning_rate import FindLearningRate

        ordered.append(FindLearningRate(plan))
    ordered.append(GracefulStop(plan, guard, saving))  # all others have seen the step by then
    if plan.stage == "fit":
        # A profile has all that a step does, so it ends after them
        ordered.append(Profile(plan, log, guard, saving, verdicts))
    return RunCallbacks(ordered, own, partial(_save_before_epoch_ends, guard, saving))


def _save_before_epoch_ends(guard: Guard, saving: Saving, trainer: Trainer) -> None:
    """Save when training stops within an epoch: later Lightning counts that as whole, and nobody could finish it."""
    guard.read_all(trainer)
    saving.save_within_epoch(trainer)
