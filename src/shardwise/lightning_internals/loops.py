"""Lightning's loops, changed: they count optimizer steps, and a resumed run goes on at the right data."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn

from shardwise.errors import ConfigError, class_name
from shardwise.lightning_internals.results import step_logging

_IS_OVER = re.compile(r"Tried to step \d+ times\. The specified number of total steps is (\d+)")  # OneCycleLR says it


class WindowLoop(_TrainingEpochLoop):
    """Makes an early stop, and the validation before it, wait for the end of the accumulation window."""

    ended_before = False  # whether the run was resumed at the end of an epoch
    _moves_schedules = False

    @property
    def global_step(self) -> int:
        """How many steps are done. A module that optimizes by hand may count `completed` up itself, as PINA does."""
        module = self.trainer.lightning_module
        if module is None or module.automatic_optimization:
            return super().global_step
        return self.manual_optimization.optim_step_progress.total.ready

    @property
    def done(self) -> bool:
        if self.trainer.should_stop and (self._should_accumulate() or not self.trainer.fit_loop._can_stop_early):
            return self._is_training_done and self._is_validation_done
        return super().done

    @property
    def _batches_that_stepped(self) -> int:
        """The step under which Lightning and its callbacks log: the batch's optimizer step, from 1."""
        return step_logging(self.trainer).number

    @_batches_that_stepped.setter
    def _batches_that_stepped(self, count: int) -> None:
        """Ignore Lightning's own count of batches, which starts at 0."""

    def run(self, data_fetcher: Any) -> None:
        if self.restarting and self._num_ready_batches_reached():  # saved after the last batch of an epoch
            self._restarting, self.ended_before = False, True
            return
        super().run(data_fetcher)

    def on_run_start(self, data_fetcher: Any) -> None:
        super().on_run_start(data_fetcher)
        # Nothing is left to be done from the time of the save: Lightning would skip some of it, or do it twice.
        self._restarting = False

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        return not self._should_accumulate() and super()._should_check_val_fx(data_fetcher)

    @property
    def batch_idx(self) -> int:
        """Lightning moves a schedule on by its `frequency` in batches of an epoch: it gets the steps of the run."""
        return self.global_step - 1 if self._moves_schedules else super().batch_idx

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Move the schedules on. `check_schedules_last` cannot tell of each OneCycleLR beforehand how long it lasts.

        Raises:
            ConfigError: a OneCycleLR is over.
        """
        self._moves_schedules = True
        try:
            super().update_lr_schedulers(interval, update_plateau_schedulers)
        except ValueError as error:
            if (over := _IS_OVER.match(str(error))) is None:
                raise
            name = class_name(self.trainer.lightning_module)
            last = self.trainer.global_step - 1  # the schedule has not been called too often there
            raise ConfigError(
                f"{name}.configure_optimizers: OneCycleLR with total_steps={over[1]} lasts to step {last}, and this "
                f"run goes on; give max_steps={last}{' max_epochs=null' if self.trainer.max_steps == -1 else ''}, or a "
                f"larger total_steps there in a new run"
            ) from None
        finally:
            self._moves_schedules = False


class OneStepABatch(_ManualOptimization):
    """Counts every batch as one step if a module optimizes by hand, however often its optimizers step in it.

    So `max_steps`, saving, validation and the log count batches. Lightning counts the steps of every optimizer.
    """

    def _on_before_step(self) -> None:
        self.trainer.profiler.start("optimizer_step")  # type: ignore[attr-defined]

    def _on_after_step(self) -> None:
        self.trainer.profiler.stop("optimizer_step")  # type: ignore[attr-defined]

    def on_run_end(self) -> Any:
        self.optim_step_progress.increment_ready()
        self.optim_step_progress.increment_completed()
        return super().on_run_end()


class ResumingLoop(_FitLoop):
    """The loop over epochs. A resumed run does the rest of its epoch as if it had not stopped."""

    _before_epoch_ends: Callable[[], Any] | None = None

    def call_before_epoch_ends(self, work: Callable[[], Any]) -> None:
        """Call `work` when an epoch ends before its last batch."""
        self._before_epoch_ends = work

    def setup_data(self) -> None:
        """Set the position in the data again if the data was loaded before the checkpoint.

        A module may read `trainer.estimated_stepping_batches` in `configure_optimizers`, which loads the data.
        Lightning would then start at the begin of the data.
        """
        super().setup_data()
        goes_on = self.restarting or self.is_resuming
        if goes_on and self._combined_loader_states_to_load and self._data_fetcher is not None:
            self._load_combined_loader_states()
            iter(self._data_fetcher)

    def reset(self) -> None:
        if self.is_resuming:
            self._settle_counters()
        super().reset()

    def _settle_counters(self) -> None:
        """Set the counters as they are between two batches or two epochs.

        They were saved within a hook, and Lightning's own correction leaves out the end of an epoch.
        """
        batches, epochs = self.epoch_loop.batch_progress, self.epoch_progress
        counted = epochs.current
        assert isinstance(counted, _ProcessedTracker)
        if batches.current.completed == batches.current.ready - 1:
            batches.increment_completed()
        if counted.processed == counted.ready:
            if counted.completed == counted.processed - 1:
                epochs.increment_completed()
            self.epoch_loop._restarting = False  # the next epoch begins

    def _load_combined_loader_states(self) -> None:
        """Load them also between two epochs, where Lightning would start with the samples of the first epoch."""
        restarting, self._restarting = self._restarting, self._restarting or self.is_resuming
        super()._load_combined_loader_states()
        self._restarting = restarting

    def on_run_start(self) -> None:
        super().on_run_start()
        self._restarting = False  # otherwise ReduceLROnPlateau would not step at the end of this epoch

    def on_advance_end(self) -> None:
        if self._before_epoch_ends is not None and not self.epoch_loop._num_ready_batches_reached():
            self._before_epoch_ends()
        super().on_advance_end()

    def on_iteration_done(self) -> None:
        super().on_iteration_done()
        loop = self.epoch_loop
        if isinstance(loop, WindowLoop) and loop.ended_before:
            # The next epoch uses the present iterator.
            loop.ended_before, self._resuming_from_checkpoint = False, True


def evaluates_loaders_together(trainer: Trainer) -> bool:
    """Whether a batch of the evaluation that begins has batches of several loaders."""
    if trainer.state.fn == TrainerFn.FITTING:
        loop = trainer.fit_loop.epoch_loop.val_loop
    else:
        loop = trainer.test_loop if trainer.testing else trainer.validate_loop
    return not loop._is_sequential


def training_modes(trainer: Trainer) -> dict[str, bool]:
    """Layer's name → whether it is in training mode; within a validation, as it was before that and will be again."""
    if trainer.validating:
        return dict(trainer.fit_loop.epoch_loop.val_loop._module_mode.mode)
    return {name: layer.training for name, layer in trainer.lightning_module.named_modules()}


# Changes the counters of Lightning's training loop.


def run_length(trainer: Trainer) -> int | None:
    """The number of the run's steps, alike on every rank; None: the data have no length that is known beforehand.

    Under max_epochs this loads the training data, once.
    """
    known = trainer.max_steps if trainer.max_steps >= 0 else trainer.estimated_stepping_batches
    return int(known) if 0 <= known < math.inf else None


def uncount_step(trainer: Trainer) -> None:
    """Count one step less, before Lightning counts a step that has changed nothing."""
    counters = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
    counters.total.completed -= 1
    counters.current.completed -= 1


def rewind(trainer: Trainer, steps: int, batches: int) -> bool:
    """Set the counters back by `steps` and their `batches`.

    Returns:
        Whether that was done. If the epoch began later than these steps, nothing changes.
    """
    loop = trainer.fit_loop.epoch_loop
    optimizer = loop.automatic_optimization.optim_progress.optimizer
    if batches > loop.batch_progress.current.ready:
        return False
    for progress, count in ((loop.batch_progress, batches), (optimizer.step, steps), (optimizer.zero_grad, steps)):
        for counter in (progress.total, progress.current):
            for name in vars(counter):
                setattr(counter, name, getattr(counter, name) - count)
    return True


def count_in_other_micro_batches(loops: dict[str, Any], before: int, now: int) -> None:
    """Convert the saved counters of micro-batches in `loops`, since a step had `before` of them and has `now`."""
    if before == now:
        return
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    for counters in (progress["total"], progress["current"]):
        ready = counters["ready"]
        for key, count in counters.items():  # at a save the window's last micro-batch is not completed yet
            counters[key] = ready // before * now - (ready - count)


# Runs a validation again that was cut short, since the run ended between a save and the end of the validation.


def validate_now(trainer: Trainer) -> None:
    """Validate when training starts, as the loop over batches would do later."""
    loop, connector = trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector
    first = connector._first_loop_iter
    loop.restarting, trainer.validating = False, True
    call._call_lightning_module_hook(trainer, "on_validation_model_zero_grad")  # as the loop over batches does
    loop.run()
    connector._first_loop_iter, trainer.training = first, True
