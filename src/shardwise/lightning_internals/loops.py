"""Lightning's Trainer, its loops and its logging: optimizer steps are counted, and data goes on where it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from shardwise.lightning_internals.results import step_logging


class WindowLoop(_TrainingEpochLoop):
    """An early stop, and the validation that comes with it, wait for the end of the accumulation window."""

    ended_before = False  # the epoch had no batches left when the run went on

    @property
    def done(self) -> bool:
        if self.trainer.should_stop and (self._should_accumulate() or not self.trainer.fit_loop._can_stop_early):
            return self._is_training_done and self._is_validation_done
        return super().done

    @property
    def _batches_that_stepped(self) -> int:
        """Under which step Lightning and its callbacks log: the optimizer step that the batch belongs to, from 1."""
        return step_logging(self.trainer).number

    @_batches_that_stepped.setter
    def _batches_that_stepped(self, count: int) -> None:
        """Lightning's own count of batches, which starts at 0, is not needed."""

    def run(self, data_fetcher: Any) -> None:
        if self.restarting and self._num_ready_batches_reached():  # saved behind the last batch of an epoch
            self._restarting, self.ended_before = False, True
            return
        super().run(data_fetcher)

    def on_run_start(self, data_fetcher: Any) -> None:
        super().on_run_start(data_fetcher)
        # What was pending when the checkpoint was written is done: Lightning would leave some of it out, or do it twice
        self._restarting = False

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        return not self._should_accumulate() and super()._should_check_val_fx(data_fetcher)


class OneStepABatch(_ManualOptimization):
    """Where a module optimizes by hand, every batch is one step, however often its optimizers step in it: `max_steps`,
    saving, validation and the log count batches. Lightning's own loop counts the steps of every optimizer."""

    def _on_before_step(self) -> None:
        self.trainer.profiler.start("optimizer_step")  # type: ignore[attr-defined]

    def _on_after_step(self) -> None:
        self.trainer.profiler.stop("optimizer_step")  # type: ignore[attr-defined]

    def on_run_end(self) -> Any:
        self.optim_step_progress.increment_ready()
        self.optim_step_progress.increment_completed()
        return super().on_run_end()


class ResumingLoop(_FitLoop):
    """The loop over epochs. What is left of an epoch when a run goes on is done as it would have been."""

    _before_epoch_ends: Callable[[], Any] | None = None

    def call_before_epoch_ends(self, work: Callable[[], Any]) -> None:
        """Where an epoch is left before its last batch."""
        self._before_epoch_ends = work

    def setup_data(self) -> None:
        """A module may ask for `trainer.estimated_stepping_batches` in `configure_optimizers`, which loads the data
        before the checkpoint has said where it goes on. Lightning would leave it at the data's begin."""
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
        """As they are between two batches, or between two epochs: what Lightning does for counters that were saved
        within a hook leaves out the end of an epoch."""
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
        """Also between two epochs, where Lightning would begin with the first epoch's samples."""
        restarting, self._restarting = self._restarting, self._restarting or self.is_resuming
        super()._load_combined_loader_states()
        self._restarting = restarting

    def on_run_start(self) -> None:
        super().on_run_start()
        self._restarting = False  # else ReduceLROnPlateau is not stepped at this epoch's end

    def on_advance_end(self) -> None:
        if self._before_epoch_ends is not None and not self.epoch_loop._num_ready_batches_reached():
            self._before_epoch_ends()
        super().on_advance_end()

    def on_iteration_done(self) -> None:
        super().on_iteration_done()
        loop = self.epoch_loop
        if isinstance(loop, WindowLoop) and loop.ended_before:
            # The next epoch takes the iterator that is there
            loop.ended_before, self._resuming_from_checkpoint = False, True
