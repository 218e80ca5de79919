"""Replaces parts of a Trainer, and reads its private parts. docs/upstream.md has the reasons."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from shardwise.errors import class_name
from shardwise.lightning_internals.hooks import install_fast_hooks
from shardwise.lightning_internals.loops import OneStepABatch, ResumingLoop, WindowLoop
from shardwise.lightning_internals.results import LoggedResults, StepLogging, StepResults, step_logging
from shardwise.plan import Plan


def prepare_trainer(
    trainer: Trainer,
    module: LightningModule,
    plan: Plan,
    *,
    restoring: Callable[[], AbstractContextManager[None]],
    before_epoch_ends: Callable[[Trainer], None],
) -> None:
    """Replace parts of a Trainer before it starts.

    `restoring`: a context for the hooks that restore a checkpoint. `before_epoch_ends`: called when training stops
    within an epoch, before Lightning counts that epoch as a whole one.
    """
    _count_in_steps(trainer, plan)
    assert isinstance(trainer.fit_loop, ResumingLoop)
    trainer.fit_loop.call_before_epoch_ends(partial(before_epoch_ends, trainer))
    install_fast_hooks(trainer, module)
    _restore_once(trainer, restoring)
    # Lightning's SIGTERM handler is a collective: a signal that reaches one rank only would hang it.
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    # Its loop would also ask rank 0 about such a signal in every micro-batch, and the host would wait for the answer.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    # Lightning would replace the batch sampler of a predict loader, whose order EvaluationLoader makes.
    trainer._data_connector._prepare_dataloader = lambda dataloader, shuffle, mode: dataloader  # type: ignore[method-assign]


def _count_in_steps(trainer: Trainer, plan: Plan) -> None:
    trainer._logger_connector = StepLogging(trainer)
    step_logging(trainer).start(trainer, plan)
    trainer.fit_loop.__class__, trainer.fit_loop.epoch_loop.__class__ = ResumingLoop, WindowLoop
    trainer.fit_loop.epoch_loop._results = StepResults()
    for evaluation in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        evaluation._results = LoggedResults(training=False)
    trainer.fit_loop.epoch_loop.manual_optimization = OneStepABatch(trainer)


def _restore_once(trainer: Trainer, restoring: Callable[[], AbstractContextManager[None]]) -> None:
    """Restore a checkpoint only once, before `on_fit_start`.

    Lightning does so for strategies that it restores before their set-up, and for others after `on_fit_start`.
    """
    connector = trainer._checkpoint_connector

    def in_context(original: Callable[..., None], *arguments: Any, **more: Any) -> None:
        with restoring():
            original(*arguments, **more)

    for name in ("_restore_modules_and_callbacks", "restore_training_state"):
        setattr(connector, name, partial(in_context, getattr(connector, name)))
    restore = connector._restore_modules_and_callbacks
    restored = False

    def once(*arguments: Any, **more: Any) -> None:
        nonlocal restored
        if not restored:
            restore(*arguments, **more)
        restored = not restored and trainer.state.fn == TrainerFn.FITTING

    connector._restore_modules_and_callbacks = once  # type: ignore[method-assign]


def is_constructed(made: LightningModule | LightningDataModule) -> bool:
    """Whether the constructor of Lightning's class has run."""
    return "_log_hyperparams" in vars(made)


def dump_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """Collect what Lightning and the hooks put into a checkpoint. Collective if one of the hooks is."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


class StoppableTrainer(Trainer):
    """A Trainer that remembers which callback or module set `should_stop`."""

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
    """The step at which training stopped early, who stopped it and why; None if nobody did."""
    if not isinstance(trainer, StoppableTrainer) or not trainer.should_stop or trainer._stopper is None:
        return None
    who = trainer._stopper
    reason = getattr(who, "stopping_reason_message", None)  # EarlyStopping has it
    name = class_name(who)
    return {
        "step": trainer.global_step,
        "by": name if isinstance(who, (Callback, LightningModule)) else f"should_stop, set in {name}",
        "reason": None if reason is None else " ".join(reason.removesuffix("Signaling Trainer to stop.").split()),
    }
