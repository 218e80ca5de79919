"""Taking back what a padding batch adds to metrics: see also tests/distributed/test_padding.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torchmetrics import Metric

from shardwise.errors import ConfigError
from shardwise.lightning_internals.padding import PaddingBatch, metrics_of


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


def trainer_of(module: LightningModule, *callbacks: Callback) -> Any:
    return SimpleNamespace(lightning_module=module, callbacks=list(callbacks), _results=None)


def test_metrics_are_found_wherever_they_are_attributes() -> None:
    metrics = [torchmetrics.SumMetric() for _ in range(9)]
    module, callback = LightningModule(), Callback()
    module.registered = metrics[0]
    module.layer = nn.Linear(1, 1)
    module.layer.named = {"a": metrics[1], "b": [(metrics[2],)]}  # type: ignore[assignment]
    module.held = Holder({"a": metrics[3]})
    module.again = [metrics[3], module.held]
    module.unregistered = [nn.ModuleList([metrics[4]])]
    callback.collection = torchmetrics.MetricCollection({"a": metrics[5]})  # type: ignore[attr-defined]
    callback.module = module  # type: ignore[attr-defined]
    module.wrapped = [torchmetrics.MinMaxMetric(metrics[6])]
    module.far = Holder(Holder(metrics[7]))  # objects in objects are not looked into
    module.data = [*range(20_000), metrics[8]]
    found = metrics_of(trainer_of(module, callback))
    assert len(found) == len(set(map(id, found)))
    assert {i for i, metric in enumerate(metrics) if any(metric is one for one in found)} == set(range(7))


def taken_back(metric: Metric, *before: float | list[float], padding: float | list[float]) -> Metric:
    module = LightningModule()
    module.metrics = [metric]
    for value in before:
        metric.update(torch.tensor(value))
    batch = PaddingBatch(trainer_of(module))
    metric.update(torch.tensor(padding))
    batch.take_back()
    return metric


def test_a_list_is_as_long_as_on_other_ranks_and_has_no_more_in_it() -> None:
    many: Any = taken_back(torchmetrics.CatMetric(), [1.0], padding=[2.0, 3.0])
    assert [one.tolist() for one in many.value] == [[1.0], []]
    first: Any = taken_back(torchmetrics.CatMetric(), padding=[2.0])
    assert [one.tolist() for one in first.value] == [[]]
    numbers: Any = taken_back(torchmetrics.CatMetric(), 1.0, padding=2.0)
    assert float(numbers.compute()) == 1.0
    assert len(numbers.value) == 2


def test_a_metric_that_had_been_computed_is_stale_again() -> None:
    metric = torchmetrics.SumMetric()
    metric.update(1.0)
    metric.compute()
    assert taken_back(metric, padding=2.0)._computed is None
    assert float(metric.compute()) == 1.0


def test_a_running_window_goes_on_where_it_was() -> None:
    metric = taken_back(torchmetrics.RunningSum(window=2), 1.0, 2.0, padding=9.0)
    metric.update(4.0)
    assert float(metric.compute()) == 6.0


def test_a_metric_that_the_batch_does_not_touch_has_no_updates() -> None:
    module = LightningModule()
    module.metric = torchmetrics.SumMetric()
    PaddingBatch(trainer_of(module)).take_back()
    assert module.metric.update_count == 0


def test_a_metric_that_the_batch_has_made_begins_anew() -> None:
    module = LightningModule()
    batch = PaddingBatch(trainer_of(module))
    module.metric = torchmetrics.MaxMetric()
    module.metric.update(2.0)
    batch.take_back()
    assert float(module.metric.compute()) == -float("inf")


def test_numbers_that_cannot_be_gathered_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"CatMetric keeps numbers without a dimension in a list \(value\)"):
        taken_back(torchmetrics.CatMetric(), padding=2.0)


class Irreps(tuple[Any, ...]):
    """A tuple that answers like e3nn's."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Any:
        raise NotImplementedError


def test_containers_of_others_are_read_without_their_own_methods() -> None:
    module, metric = LightningModule(), torchmetrics.SumMetric()
    module.irreps = Irreps((1, metric))
    assert metrics_of(trainer_of(module)) == [metric]
