"""What a module logs with `self.log`: the value of a whole accumulation window, kept across a resume."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import Tensor
from torchmetrics import Metric

from shardwise.plan import Plan
from shardwise.protocols import rows_are_steps
from shardwise.run_dir.checkpoints import step_of


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

    def begin_micro_batch(self) -> None:
        self.micro_batch += 1

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
    _claim: Callable[[Collection[str]], None] | None = None

    def start(self, trainer: Trainer, plan: Plan) -> None:
        self.trainer, self.plan = trainer, plan
        if plan.stage != "fit" and plan.resume is not None:
            self.number = max(0, step_of(plan.resume))

    def tell_names_to(self, claim: Callable[[Collection[str]], None]) -> None:
        """`claim` is told the names that the module logs under."""
        self._claim = claim

    def between_steps(self, step: int) -> None:
        """What is logged from here on, until the next step begins, belongs to `step`."""
        self.number = step

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
            step_results(self.trainer).begin_micro_batch()

    def log_metrics(self, metrics: dict[str, Tensor], step: int | None = None) -> None:
        if self._claim is not None:
            self._claim(metrics)
        super().log_metrics(metrics, step)

    def update_eval_step_metrics(self, step: int) -> None:
        """`step` is Lightning's count of validation batches, which is no step of the run: trackers alone get these."""
        loggers = self.trainer.loggers
        self.trainer.loggers = [logger for logger in loggers if not rows_are_steps(logger)]
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


_KEPT = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx",
         "dataloader_idx", "metric_attribute")  # fmt: skip


def restore_callback_metrics(trainer: Trainer, metrics: dict[str, Any]) -> None:
    """What ReduceLROnPlateau and callbacks look at, of the run that is resumed."""
    trainer._logger_connector._callback_metrics.update(metrics)


def validation_results(trainer: Trainer) -> dict[str, Any]:
    """Of the validation within training that has just ended, and of nothing else: `trainer.callback_metrics` also has
    what training logged in the epoch before."""
    results = trainer.fit_loop.epoch_loop.val_loop._results
    found: dict[str, Any] = results.metrics(on_step=False)["callback"]
    return found


def prediction_loaders(trainer: Trainer) -> list[Any]:
    combined = trainer.predict_loop._combined_loader
    assert combined is not None
    return list(combined.flattened)


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


@contextmanager
def unrecorded(module: LightningModule) -> Iterator[None]:
    """A step whose results count nowhere. What it logs is registered, with a weight of zero: a rank that runs nothing
    but padding takes part in the reductions at the end of the epoch like any other."""
    results: dict[str, Any] = {} if module.trainer._results is None else module.trainer._results  # predict has none
    known = set(map(id, results.values()))
    metrics = [m for m in (*module.modules(), *results.values()) if isinstance(m, Metric)]
    states = [(m, m._copy_state_dict(), m._update_count, m._computed) for m in metrics]
    yield
    for metric, state, count, computed in states:
        for name, value in state.items():
            if value == [] and (added := getattr(metric, name)):
                value = [tensor[:0] for tensor in added]  # of no length, but of a dtype that others can gather
            setattr(metric, name, value)
        metric._update_count, metric._computed = max(1, count), computed  # at 0 it would warn
    for result in results.values():
        if isinstance(result, _ResultMetric) and id(result) not in known and result.is_tensor:
            for name, default in result._defaults.items():
                setattr(result, name, torch.full_like(getattr(result, name), float(cast(Tensor, default))))
