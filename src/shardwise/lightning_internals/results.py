"""Collects what a module logs with `self.log`, over whole accumulation windows and across a resume."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import Tensor

from shardwise.distributed.mesh import gather_objects
from shardwise.plan import Plan
from shardwise.protocols import rows_are_steps
from shardwise.run_dir.checkpoints import step_of

# What `self.log` is given, on its way to Lightning's collections: a strategy may change it, refuse it or drop it.


@dataclass(frozen=True)
class LoggedValue:
    """`hook`: the step or hook that logs. `value`: a tensor, or a metric. `options`: what else `self.log` is given."""

    hook: str
    name: str
    value: Any
    options: dict[str, Any]


class LoggedResults(_ResultCollection):
    """Lightning's collection of logged values."""

    take: Callable[[LoggedValue], Any] | None = None  # gives the value that is logged; None: it is left out

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        taken = value if self.take is None else self.take(LoggedValue(fx, name, value, options))
        if taken is not None:
            super().log(fx, name, taken, **options)


def take_logged_by(trainer: Trainer, take: Callable[[LoggedValue], Any]) -> None:
    """Log what `take` gives for each value that the module and its callbacks log in training and evaluation."""
    for loop in (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop,
                 trainer.test_loop):  # fmt: skip
        assert isinstance(loop._results, LoggedResults)
        loop._results.take = take


class StepResults(LoggedResults):
    """The values that the module logs in training. Those of a window's micro-batches become one value."""

    def __init__(self) -> None:
        super().__init__(training=True)
        self.micro_batch = 0
        self._parts: dict[str, dict[int, tuple[Tensor, Any]]] = {}  # key → micro-batch → (value, weight)

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        super().update_metrics(key, value, batch_size)
        result = self[key]
        if result.is_tensor and result.meta.on_step and result._forward_cache is not None:
            self._parts.setdefault(key, {})[self.micro_batch] = result._forward_cache.detach(), batch_size

    def begin_micro_batch(self) -> None:
        self.micro_batch += 1

    def go_to(self, micro_batch: int, batch: Any) -> None:
        self.micro_batch, self.batch, self.batch_size = micro_batch, batch, None

    def end_window(self) -> dict[str, Tensor]:
        """The values of the window that has just ended, by name, on their device. The host does not wait for them."""
        parts, self._parts = self._parts, {}
        values: dict[str, Tensor] = {}
        for key, result in self.valid_items():
            cache = self._get_cache(result, on_step=True) if result.meta.logger else None
            if cache is not None:
                _, name = self._forked_name(result, on_step=True)
                of_window = list(parts.get(key, {}).values())
                values[name] = _reduce(result.meta, of_window) if len(of_window) > 1 else cache
        return values

    def for_progress_bar(self, window: dict[str, Tensor]) -> dict[str, Tensor]:
        """The values that the module logs with `prog_bar=True`: those of the `window`, and those for no logger."""
        found: dict[str, Tensor] = {}
        for _, result in self.valid_items():
            cache = self._get_cache(result, on_step=True) if result.meta.prog_bar else None
            if cache is not None:
                found[result.meta.name] = window.get(self._forked_name(result, on_step=True)[1], cache).detach()
        return found

    def drop_window(self) -> None:
        self._parts = {}

    def step_names(self) -> set[str]:
        """The names under which callbacks find only the value of the last micro-batch."""
        return {self._forked_name(result, on_step=True)[1] for result in self.values() if result.meta.on_step}

    def names(self) -> set[str]:
        """The names under which the module logs, now or at the end of the epoch."""
        return {self._forked_name(r, on_step)[1] for r in self.values() if r.meta.logger for on_step in (True, False)}


def _reduce(meta: Any, parts: list[tuple[Tensor, Any]]) -> Tensor:
    """Reduce as Lightning does over an epoch: by `reduce_fx`, and a mean is weighted by `batch_size`."""
    values = torch.stack([value for value, _ in parts])
    if meta.is_mean_reduction:
        weights = [weight for _, weight in parts]
        if all(weight is weights[0] or weight == weights[0] for weight in weights):
            return torch.mean(values)
        return cast(Tensor, torch.stack([value * weight for value, weight in parts]).sum() / sum(weights))
    return cast(Tensor, meta.reduce_fx(values))


class StepLogging(_LoggerConnector):
    """Lightning's logging, under the number of the optimizer step.

    The module's values of a step are written in one row with the run's own values: see callbacks/steps.py.
    """

    number = 0  # the number of the current step, or of the last one
    last: int | None = None  # the number of the run's last step under max_epochs, known when that step begins
    plan: Plan
    _claim: Callable[[Collection[str]], None] | None = None
    _share: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    _shared: Mapping[str, Any] = MappingProxyType({})
    _group: dist.ProcessGroup | None = None

    def start(self, trainer: Trainer, plan: Plan) -> None:
        self.trainer, self.plan = trainer, plan
        if plan.stage != "fit" and plan.resume is not None:
            self.number = max(0, step_of(plan.resume))

    def call_with_names(self, claim: Callable[[Collection[str]], None]) -> None:
        """Call `claim` with the names under which the module logs, each time it logs."""
        self._claim = claim

    def between_steps(self, step: int) -> None:
        """Log under `step` until the next step begins."""
        self.number = step

    @property
    def should_update_logs(self) -> bool:
        if self.trainer.training:
            return self.logs(self.number) or self.trainer.should_stop
        return super().should_update_logs

    def logs(self, step: int) -> bool:
        """Whether the numbers of `step` are logged. All ranks agree, and it is known when the step begins."""
        return self.plan.logs(step) or step == self.last

    def _ends_run(self) -> bool:
        """Whether this window is the last one of max_epochs; False if the length of the data is not known."""
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
            step_results(self.trainer).begin_micro_batch()

    def log_metrics(self, metrics: dict[str, Tensor], step: int | None = None) -> None:
        if self._claim is not None:
            self._claim(metrics)
        super().log_metrics(metrics, step)

    def update_eval_step_metrics(self, step: int) -> None:
        """Give these values to trackers only, since `step` counts validation batches and not steps of the run."""
        loggers = self.trainer.loggers
        self.trainer.loggers = [logger for logger in loggers if not rows_are_steps(logger)]
        super().update_eval_step_metrics(step)
        self.trainer.loggers = loggers

    def share_metrics_by(self, share: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Let callbacks on every rank read the metrics that `share` gives for this rank's own.

        It is called at the end of each epoch of training and evaluation, on all ranks."""
        self._share = share

    def reduce_over(self, group: dist.ProcessGroup) -> None:
        """Say over which ranks values are reduced that are logged with `sync_dist=True`."""
        self._group = group

    def epoch_end_reached(self) -> None:
        super().epoch_end_reached()
        if self._group is not None:
            align_logged(self.trainer, self._group)

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        self.share_metrics()

    def share_metrics(self) -> None:
        """Give callbacks on every rank the metrics of now. Collective, see `share_metrics_by`."""
        if self._share is not None:
            self._shared = self._share(dict(super().callback_metrics))

    @property
    def callback_metrics(self) -> dict[str, Any]:
        found: dict[str, Any] = super().callback_metrics
        found.update(self._shared)
        return found

    def update_train_step_metrics(self) -> None:
        """Do nothing, since these values are written with the row of the step."""


def step_logging(trainer: Trainer) -> StepLogging:
    assert isinstance(trainer._logger_connector, StepLogging)
    return trainer._logger_connector


def step_results(trainer: Trainer) -> StepResults:
    results = trainer.fit_loop.epoch_loop._results
    assert isinstance(results, StepResults)
    return results


_SAVED = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx",
         "dataloader_idx", "metric_attribute")  # fmt: skip


def restore_callback_metrics(trainer: Trainer, metrics: dict[str, Any]) -> None:
    """Restore the metrics that ReduceLROnPlateau and callbacks read, from the run that is resumed."""
    trainer._logger_connector._callback_metrics.update(metrics)


def validation_results(trainer: Trainer) -> dict[str, Any]:
    """The results of the validation that has just ended within training.

    `trainer.callback_metrics` also has what training logged in the epoch before.
    """
    results = trainer.fit_loop.epoch_loop.val_loop._results
    found: dict[str, Any] = results.metrics(on_step=False)["callback"]
    return found


def prediction_loaders(trainer: Trainer) -> list[Any]:
    combined = trainer.predict_loop._combined_loader
    assert combined is not None
    return list(combined.flattened)


def logged_so_far(trainer: Trainer) -> dict[str, Any]:
    """The values that `self.log` has collected in the current epoch on this rank, without those of torchmetrics."""
    return _entries(trainer.fit_loop.epoch_loop._results)


def _entries(results: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, metric in results.items():
        meta = metric.meta
        reduction = next((name for name, by in _REDUCTIONS.items() if by is meta.reduce_fx), None)
        if metric.is_tensor and not metric.has_reset and meta.sync.group is None and reduction is not None:
            found[key] = {
                "meta": {name: getattr(meta, name) for name in _SAVED} | {"reduce_fx": reduction},
                "sync": [meta.sync.should, meta.sync.rank_zero_only],
                "state": {name: getattr(metric, name) for name in metric._defaults},
                "step": metric._forward_cache,
            }
    return found


# Lightning compares what a step gives with what it gave before, so that a name comes back as the same function.
_REDUCTIONS = {"mean": torch.mean, "sum": torch.sum, "max": torch.max, "min": torch.min,
               "builtins.sum": sum, "builtins.max": max, "builtins.min": min}  # fmt: skip


def restore_logged(trainer: Trainer, saved: dict[str, Any]) -> None:
    """Restore the values that `logged_so_far` has given."""
    device = trainer.strategy.root_device
    for key, entry in saved.items():
        metric = _without_values(trainer, entry)
        for name, value in entry["state"].items():
            setattr(metric, name, value.to(device))
        metric._forward_cache = None if entry["step"] is None else entry["step"].to(device)
        trainer.fit_loop.epoch_loop._results[key] = metric
    trainer._logger_connector._first_loop_iter = False  # otherwise the first batch would reset the values


def _without_values(trainer: Trainer, entry: dict[str, Any]) -> _ResultMetric:
    meta = _Metadata(**(entry["meta"] | {"reduce_fx": _REDUCTIONS[entry["meta"]["reduce_fx"]]}))
    should, rank_zero_only = entry["sync"]
    meta.sync = _Sync(fn=trainer.strategy.reduce, _should=should, rank_zero_only=rank_zero_only)
    metric = _ResultMetric(meta, True).to(trainer.strategy.root_device)
    metric._update_count = 1
    return metric


def align_logged(trainer: Trainer, group: dist.ProcessGroup) -> None:
    """Let all ranks have the names that any of them has logged with `sync_dist=True`, in one order. Collective.

    Lightning reduces one value after the other: the third of one rank would be added to the third of another.
    """
    results: Any = trainer._results
    own = {
        key: {part: entry[part] for part in ("meta", "sync")}
        for key, entry in ({} if results is None else _entries(results)).items()
        if entry["sync"] == [True, False]
    }
    ranks = gather_objects(group, own)
    if all(list(entries) == list(own) for entries in ranks):
        return
    for key, entry in {key: entry for entries in ranks for key, entry in entries.items()}.items():
        results[key] = results.pop(key) if key in own else _without_values(trainer, entry)


@contextmanager
def in_micro_batch(trainer: Trainer, number: int, micro_batches: int, batch: Any) -> Iterator[None]:
    """Let `self.log` take what it is given for a value of that micro-batch of the window, the last of which is current.

    A pipeline runs the micro-batches of a window when the last one has come.
    """
    results, module = step_results(trainer), trainer.lightning_module
    last, name = (results.micro_batch, results.batch), module._current_fx_name
    results.go_to(last[0] - (micro_batches - 1) + number, batch)
    module._current_fx_name = "training_step"
    try:
        yield
    finally:
        results.go_to(*last)
        module._current_fx_name = name
