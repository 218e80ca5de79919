"""Takes back what a padding batch adds to metrics of torchmetrics, wherever they are kept, and to what is logged."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from shardwise.distributed.rng import random_state, set_random_state
from shardwise.errors import ConfigError, class_name

_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, frozenset, deque)
_MOST = 10_000  # a container of more elements has data in it, and no metrics
_LIBRARIES = ("builtins", "lightning", "shardwise", "torch", "torchmetrics")  # their objects have none of a user's


class PaddingBatch:
    """A batch of an evaluation whose results do not count, from before its first hook to after its last.

    Every rank computes metrics and values equally often and in the same order, as if each had had a batch: what the
    batch has logged is registered with a weight of zero, what it has made stale stays stale, and a state that is a
    list becomes as long as elsewhere.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._before = {
            id(metric): (metric, metric._copy_state_dict(), _counts(metric)) for metric in self._all().values()
        }

    def _all(self) -> dict[int, Metric]:
        return {id(metric): metric for metric in (*metrics_of(self.trainer), *_results_of(self.trainer))}

    def take_back(self) -> None:
        """Call it after the last hook of the batch.

        Raises:
            ConfigError: a metric has got what cannot be taken back.
        """
        for key, metric in (self._all() | {key: metric for key, (metric, *_) in self._before.items()}).items():
            if isinstance(metric, _ResultMetric) and metric.has_reset:
                continue  # nothing has been logged since
            if key in self._before:
                _, state, counts = self._before[key]
            else:
                state, counts = {name: _beginning(metric, name) for name in metric._defaults}, {"_update_count": 0}
            _put_back(metric, state, counts)


def metrics_of(trainer: Trainer) -> list[Metric]:
    """The metrics in the module, its layers and callbacks, also in containers and objects that are their attributes."""
    module, callbacks, seen = trainer.lightning_module, cast(Any, trainer).callbacks, set[int]()
    modules: list[nn.Module] = [module]
    for owner in (*module.modules(), *callbacks):
        modules += _modules_in(vars(owner), seen, objects=1)
    layers = {id(layer): layer for module in modules for layer in module.modules()}
    return [layer for layer in layers.values() if isinstance(layer, Metric)]


def _modules_in(value: Any, seen: set[int], objects: int) -> Iterator[nn.Module]:
    """The modules in `value`, in containers in it, and in attributes of objects, so many of them deep."""
    if isinstance(value, nn.Module):
        if id(value) not in seen:
            seen.add(id(value))
            yield value
    elif (kind := next((kind for kind in _CONTAINERS if isinstance(value, kind)), None)) is not None:
        # What a subclass has made of len() or iter() may raise: the container's own say what is in it.
        if kind.__len__(value) > _MOST or id(value) in seen:
            return
        seen.add(id(value))
        for element in list(dict.values(value) if kind is dict else kind.__iter__(value)):
            yield from _modules_in(element, seen, objects)
    elif objects and _may_have_metrics(value) and id(value) not in seen:
        seen.add(id(value))
        yield from _modules_in(vars(value), seen, objects - 1)


def _may_have_metrics(value: Any) -> bool:
    if isinstance(value, (type, Tensor, FunctionType, MethodType, ModuleType)) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _LIBRARIES


def _results_of(trainer: Trainer) -> list[Metric]:
    results: Any = trainer._results  # predict has none
    return [] if results is None else list(results.values())


def _counts(metric: Metric) -> dict[str, int]:
    """What a metric counts beside its state: its updates, and the values of a running window."""
    return {name: value for name, value in vars(metric).items() if type(value) is int}


def _beginning(metric: Metric, name: str) -> Any:
    default, now = metric._defaults[name], getattr(metric, name)
    if isinstance(default, list):
        return []
    return default.detach().clone().to(now) if isinstance(now, Tensor) else default.detach().clone()


def _put_back(metric: Metric, state: dict[str, Any], counts: dict[str, int]) -> None:
    """`_computed` stays as the batch has left it: where a real batch came, the metric is computed anew, too."""
    for name, value in state.items():
        if isinstance(value, list):
            now = getattr(metric, name)
            added = now[len(value) :] if isinstance(now, list) else []
            value = [*value, *(_empty(metric, name, element, bool(value)) for element in added)]
        setattr(metric, name, value)
    for name, count in counts.items():
        if getattr(metric, name, count) != count:
            setattr(metric, name, max(1, count) if name == "_update_count" else count)  # torchmetrics warns at 0


def _empty(metric: Metric, name: str, element: Any, has_others: bool) -> Any:
    """What a list has instead of an element that does not count: other ranks gather one more, of this type."""
    if not isinstance(element, Tensor) or element.ndim:
        return element[:0]
    if has_others and metric._reductions[name] is dim_zero_cat:
        return torch.empty_like(element.reshape(1)[:0])
    raise ConfigError(
        f"{class_name(metric)} keeps numbers without a dimension in a list ({name}), and this rank has none while "
        f"others have: they cannot be gathered. Give it values.reshape(1), or validate on as many batches as there are "
        f"ranks, or a multiple of that"
    )


class Evaluation:
    """What an evaluation leaves no trace of: batches that are padding, and the random numbers that it draws."""

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._given: deque[bool] = deque()  # of each batch that the loader gave and no step has taken
        self._batch: PaddingBatch | None = None  # the current one

    def begin(self, device: torch.device | None) -> None:
        """Keep where random streams stand, of the host and of `device`. None: what comes after draws anew."""
        self._device = device
        self._streams = None if device is None else random_state(device)

    def end(self) -> None:
        """Set them back, so that a validation does not change the training."""
        if self._device is not None and self._streams is not None:
            set_random_state(self._streams, self._device)

    def note(self, is_padding: bool) -> None:
        """Note the next batch that the loader gives."""
        self._given.append(is_padding)

    def begin_batch(self, trainer: Trainer) -> None:
        """Called before the first hook of a batch."""
        self._batch = PaddingBatch(trainer) if not trainer.training and self._given and self._given[0] else None

    def take(self) -> bool:
        """Whether the batch whose step begins is padding."""
        return self._given.popleft()

    def end_batch(self) -> None:
        """Called after the last hook of a batch."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.take_back()
