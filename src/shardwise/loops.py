"""Lightning's Trainer, its loops and its logging: optimizer steps are counted, and data goes on where it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import Tensor

from shardwise.checkpoint.find import step_of
from shardwise.loggers import CsvLogger
from shardwise.plan import Plan


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


class StepResults(_ResultCollection):
    """What the module logs in training. A value that it logs in several micro-batches of a window is the window's."""

    def __init__(self) -> None:
        super().__init__(training=True)
        self.micro_batch = 0
        self._parts: dict[str, dict[int, tuple[Tensor, Any]]] = {}  # by key and micro-batch: value, weight

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        super().update_metrics(key, value, batch_size)
        result = self[key]
        if result.is_tensor and result.meta.on_step and result._forward_cache is not None:
            self._parts.setdefault(key, {})[self.micro_batch] = result._forward_cache.detach(), batch_size

    def take_window(self) -> dict[str, Tensor]:
        """Name → value of the window that has just ended, on its device. Waits for nothing."""
        parts, self._parts = self._parts, {}
        values: dict[str, Tensor] = {}
        for key, result in self.valid_items():
            cache = self._get_cache(result, on_step=True) if result.meta.logger else None
            if cache is not None:
                _, name = self._forked_name(result, on_step=True)
                of_window = list(parts.get(key, {}).values())
                values[name] = _reduce(result.meta, of_window) if len(of_window) > 1 else cache
        return values

    def for_bar(self, window: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of a `window`'s values and what no logger gets: those that the module logs with `prog_bar=True`."""
        found: dict[str, Tensor] = {}
        for _, result in self.valid_items():
            cache = self._get_cache(result, on_step=True) if result.meta.prog_bar else None
            if cache is not None:
                found[result.meta.name] = window.get(self._forked_name(result, on_step=True)[1], cache).detach()
        return found

    def drop_window(self) -> None:
        self._parts = {}

    def step_names(self) -> set[str]:
        """Under which callbacks find the value of the last micro-batch alone."""
        return {self._forked_name(result, on_step=True)[1] for result in self.values() if result.meta.on_step}

    def names(self) -> set[str]:
        """Under which the module logs, now or at the end of the epoch."""
        return {self._forked_name(r, on_step)[1] for r in self.values() if r.meta.logger for on_step in (True, False)}


def _reduce(meta: Any, parts: list[tuple[Tensor, Any]]) -> Tensor:
    """As Lightning reduces over an epoch: by `reduce_fx`, a mean weighted by `batch_size`."""
    values = torch.stack([value for value, _ in parts])
    if meta.is_mean_reduction:
        weights = [weight for _, weight in parts]
        if all(weight is weights[0] or weight == weights[0] for weight in weights):
            return torch.mean(values)
        return cast(Tensor, torch.stack([value * weight for value, weight in parts]).sum() / sum(weights))
    return cast(Tensor, meta.reduce_fx(values))


class StepLogging(_LoggerConnector):
    """Lightning's logging, with the step's number that this program logs under. The module's values of a step are
    written in one row with the run's own: see callbacks/steps.py."""

    number = 0  # of the step that the batch belongs to, or of the last step
    last: int | None = None  # the number of the run's last step under max_epochs, from that step's begin on
    plan: Plan
    claim: Callable[[Collection[str]], None] | None = None  # is told the names that the module logs under

    def start(self, trainer: Trainer, plan: Plan) -> None:
        self.trainer, self.plan = trainer, plan
        if plan.stage != "fit" and plan.resume is not None:
            self.number = max(0, step_of(plan.resume))

    @property
    def should_update_logs(self) -> bool:
        if self.trainer.training:
            return self.logs(self.number) or self.trainer.should_stop
        return super().should_update_logs

    def logs(self, step: int) -> bool:
        """Whether the step's numbers are logged: alike on every rank, and known when the step begins."""
        return self.plan.logs(step) or step == self.last

    def _ends_run(self) -> bool:
        """Whether the window is the last one of max_epochs. Data of unknown length do not tell."""
        loop, most = self.trainer.fit_loop, self.plan.max_epochs
        if most is None or self.trainer.current_epoch + 1 < most:
            return False
        windows = -(-loop.epoch_loop.batch_progress.current.ready // self.plan.accumulate_grad_batches)
        return windows * self.plan.accumulate_grad_batches >= loop.max_batches

    def on_batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        super().on_batch_start(batch, dataloader_idx)
        if self.trainer.training:
            self.number = self.trainer.global_step + 1
            if self._ends_run():
                self.last = self.number
            step_results(self.trainer).micro_batch += 1

    def log_metrics(self, metrics: dict[str, Tensor], step: int | None = None) -> None:
        if self.claim is not None:
            self.claim(metrics)
        super().log_metrics(metrics, step)

    def update_eval_step_metrics(self, step: int) -> None:
        """`step` is Lightning's count of validation batches, which is no step of the run: trackers alone get these."""
        loggers = self.trainer.loggers
        self.trainer.loggers = [logger for logger in loggers if not isinstance(logger, CsvLogger)]
        super().update_eval_step_metrics(step)
        self.trainer.loggers = loggers

    def update_train_step_metrics(self) -> None:
        """They go into the step's row."""


def step_logging(trainer: Trainer) -> StepLogging:
    assert isinstance(trainer._logger_connector, StepLogging)
    return trainer._logger_connector


def step_results(trainer: Trainer) -> StepResults:
    results = trainer.fit_loop.epoch_loop._results
    assert isinstance(results, StepResults)
    return results


def count_in_steps(trainer: Trainer, plan: Plan) -> None:
    """Put these into a Trainer that has not started."""
    trainer._logger_connector = StepLogging(trainer)
    step_logging(trainer).start(trainer, plan)
    trainer.fit_loop.__class__, trainer.fit_loop.epoch_loop.__class__ = ResumingLoop, WindowLoop
    trainer.fit_loop.epoch_loop._results = StepResults()
    trainer.fit_loop.epoch_loop.manual_optimization = OneStepABatch(trainer)


class ResumingLoop(_FitLoop):
    """The loop over epochs. What is left of an epoch when a run goes on is done as it would have been."""

    leaving_epoch: Callable[[], Any] | None = None  # called where an epoch is left before its last batch

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
        if self.leaving_epoch is not None and not self.epoch_loop._num_ready_batches_reached():
            self.leaving_epoch()
        super().on_advance_end()

    def on_iteration_done(self) -> None:
        super().on_iteration_done()
        loop = self.epoch_loop
        if isinstance(loop, WindowLoop) and loop.ended_before:
            # The next epoch takes the iterator that is there
            loop.ended_before, self._resuming_from_checkpoint = False, True


def before_epoch_ends(trainer: Trainer, work: Callable[[], Any]) -> None:
    """`work` is done before an epoch that training stops in is counted as a whole one."""
    assert isinstance(trainer.fit_loop, ResumingLoop)
    trainer.fit_loop.leaving_epoch = work


_KEPT = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx",
         "dataloader_idx", "metric_attribute")  # fmt: skip


def logged_so_far(trainer: Trainer) -> dict[str, Any]:
    """What `self.log` has gathered of the epoch that is under way, on this rank; without metrics of torchmetrics."""
    found: dict[str, Any] = {}
    for key, metric in trainer.fit_loop.epoch_loop._results.items():
        meta = metric.meta
        if metric.is_tensor and not metric.has_reset and meta.sync.group is None and meta.reduce_fx in _REDUCTIONS:
            found[key] = {
                "meta": {name: getattr(meta, name) for name in _KEPT} | {"reduce_fx": meta.reduce_fx.__name__},
                "sync": [meta.sync.should, meta.sync.rank_zero_only],
                "state": {name: getattr(metric, name) for name in metric._defaults},
                "step": metric._forward_cache,
            }
    return found


_REDUCTIONS = (torch.mean, torch.sum, torch.max, torch.min)


def log_on(trainer: Trainer, saved: dict[str, Any]) -> None:
    """Take up what `logged_so_far` gave."""
    device = trainer.strategy.root_device
    for key, kept in saved.items():
        meta = _Metadata(**kept["meta"])
        should, rank_zero_only = kept["sync"]
        meta.sync = _Sync(fn=trainer.strategy.reduce, _should=should, rank_zero_only=rank_zero_only)
        metric = _ResultMetric(meta, True)
        for name, value in kept["state"].items():
            setattr(metric, name, value.to(device))
        metric._forward_cache = None if kept["step"] is None else kept["step"].to(device)
        metric._update_count = 1
        trainer.fit_loop.epoch_loop._results[key] = metric
    trainer._logger_connector._first_loop_iter = False  # the first batch of a loop would begin anew


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
