"""The user's loaders under our order: windows that know their weight, and validation that counts every sample once."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from shardwise.data.order import GlobalOrder
from shardwise.errors import ConfigError, a_or_an
from shardwise.launch.signals import leave_to_parent
from shardwise.launch.worker import kill_with_parent
from shardwise.plan import Plan

_STEPS_AT_A_TIME = 64  # whose order is worked out: a call costs as much for one sample as for a thousand


class TrainLoader:
    """A rank's micro-batches in the global order, window by window (a window: the micro-batches of one step).

    The module's `loss_weight(batch)` is asked for the whole window before its first micro-batch is handed over, and
    summed over the data-parallel ranks: `scales` then holds, per micro-batch handed over and not yet taken, the factor
    that makes the accumulated, rank-averaged gradient that of the mean over the global batch.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        plan: Plan,
        rank: int,
        device: torch.device,
        loss_weight: Callable[[Any], int] | None,
        flops: Callable[[Any], int] | None = None,
    ) -> None:
        _check_kind(loader, plan, "train")
        if loader.batch_size != plan.micro_batch_size:
            raise ConfigError(
                f"the training loader's batch_size is {loader.batch_size}, and micro_batch_size="
                f"{plan.micro_batch_size}: make them equal, e.g. 'data.batch_size=${{micro_batch_size}}'"
            )
        self.plan, self.rank, self.device, self.loss_weight, self.flops = plan, rank, device, loss_weight, flops
        self.iterable = loader if isinstance(loader.dataset, IterableDataset) else None
        self.consumed = 0  # samples of all ranks whose micro-batches were handed over: the training clock
        self.scales: deque[Tensor | None] = deque()
        self.window_start = 0  # the clock at the window that is being handed over
        self.window_begins = False  # until its first micro-batch was taken note of
        self.window_weight = 0  # of this rank's micro-batches: summed loss weights (tokens, samples)
        self.window_flops = 0  # and FLOPs
        self.fetching_seconds = 0.0  # that the host waited for them
        if self.iterable is not None and plan.guard.on_spike == "rollback":
            raise ConfigError(
                "guard.on_spike=rollback: an iterable data set starts anew when a run goes back, and its windows are "
                "not found again; use guard.on_spike=skip"
            )
        if self.iterable is None:
            self.order = GlobalOrder(
                samples=len(loader.dataset),  # type: ignore[arg-type]
                global_batch_size=plan.global_batch_size,
                shuffle=_shuffles(loader),
                seed=plan.seed,
                max_steps_per_epoch=(
                    None if plan.max_train_batches is None else plan.max_train_batches // plan.accumulate_grad_batches
                ),
            )
            self.loader = _with_batches(loader, self._batches(), plan.seed)

    def __len__(self) -> int:
        if self.iterable is not None:
            return len(self.iterable) // self.plan.accumulate_grad_batches * self.plan.accumulate_grad_batches
        return self.order.steps_per_epoch * self.plan.accumulate_grad_batches

    def __iter__(self) -> Iterator[Any]:
        self.scales.clear()
        batches = iter(self.loader if self.iterable is None else self.iterable)
        micro_batches = self.plan.accumulate_grad_batches
        while True:
            asked = time.perf_counter()
            window = list(islice(batches, micro_batches))
            if len(window) < micro_batches:
                return
            self.fetching_seconds = time.perf_counter() - asked
            self.window_start, self.window_begins = self.consumed, True
            self.window_flops = sum(map(self.flops, window)) if self.flops else 0
            for batch, scale in zip(window, self._window_scales(window), strict=True):
                self.consumed += self.plan.micro_batch_size * self.plan.topology.data_parallel_size
                self.scales.append(scale)
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"samples_consumed": self.consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.consumed = state["samples_consumed"]

    def samples_of(self, start: int) -> list[list[int]] | None:
        """Per micro-batch of this rank's window at clock `start`: its places in the data set. None: it is iterable."""
        if self.iterable is not None:
            return None
        return self._own_micro_batches(start, self.plan.global_batch_size)

    def _own_micro_batches(self, start: int, count: int) -> list[list[int]]:
        plan = self.plan
        ranks, size = plan.topology.data_parallel_size, plan.micro_batch_size
        return cast(list[list[int]], self.order.micro_batches(start, count, self.rank, ranks, size).tolist())

    def _batches(self) -> _Batches:
        return _Batches(self._rest_of_epoch, len(self))

    def _rest_of_epoch(self) -> Iterator[list[int]]:
        plan = self.plan
        start = self.consumed // plan.global_batch_size * plan.global_batch_size
        end = (start // self.order.samples_per_epoch + 1) * self.order.samples_per_epoch
        chunk = _STEPS_AT_A_TIME * plan.global_batch_size
        for first in range(start, end, chunk):
            yield from self._own_micro_batches(first, min(chunk, end - first))

    def _window_scales(self, window: list[Any]) -> list[Tensor | None]:
        if self.loss_weight is None:
            return [None] * len(window)
        weights = [self.loss_weight(batch) for batch in window]
        self.window_weight = sum(weights)
        if len(window) == self.plan.topology.data_parallel_size == 1 and weights[0] > 0:
            return [None]  # the micro-batch is the whole global batch
        # torch.tensor would wait for the copy
        total = torch.full((), sum(weights), dtype=torch.float64, device=self.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
        # The strategy averages over ranks and Lightning over micro-batches: both divisors are put back.
        per_weight = len(window) * self.plan.topology.data_parallel_size / total.clamp(min=1)
        return [weight * per_weight for weight in weights]


class EvaluationLoader:
    """A rank's share of a data set, each sample on one rank; every rank gets equally many batches.

    Strategies that gather parameters need all ranks in every forward. A rank without samples left runs a padding batch;
    `paddings` holds, per batch handed over and not yet taken, whether it is one. `limit`: batches of all ranks.
    """

    def __init__(
        self, loader: DataLoader[Any], plan: Plan, rank: int, paddings: deque[bool], limit: int | None = None
    ) -> None:
        _check_kind(loader, plan, "evaluation")
        self.paddings = paddings
        ranks = plan.topology.data_parallel_size
        self.loader = loader
        self.limit = limit
        self.is_padding: list[bool] | None = None  # None: an iterable on one rank
        if isinstance(loader.dataset, IterableDataset):
            return
        samples, size = len(loader.dataset), loader.batch_size or 1  # type: ignore[arg-type]
        samples = samples if limit is None else min(samples, limit * size)
        batches = [
            list(range(start, min(start + size, samples)))
            for start in range(rank * size, math.ceil(samples / (size * ranks)) * size * ranks, size * ranks)
        ]
        self.is_padding = [not batch for batch in batches]
        self.loader = _with_batches(loader, [batch or [0] for batch in batches], plan.seed)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.paddings.clear()
        for number, batch in enumerate(self.loader):
            if self.is_padding is None and number == self.limit:
                return
            self.paddings.append(self.is_padding is not None and self.is_padding[number])
            yield batch


class _Batches:
    """A batch sampler whose next pass starts where the clock stands."""

    def __init__(self, make: Callable[[], Iterator[list[int]]], length: int) -> None:
        self.make, self.length = make, length

    def __iter__(self) -> Iterator[list[int]]:
        return self.make()

    def __len__(self) -> int:
        return self.length


def _with_batches(loader: DataLoader[Any], batches: Any, seed: int) -> DataLoader[Any]:
    """The same loader with another order."""
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=partial(_start_worker, loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        # Of its own: else each pass would draw from the stream that dropout draws from, and so would a resumed one.
        generator=loader.generator or torch.Generator().manual_seed(seed),
    )


def _start_worker(then: Callable[[int], None] | None, worker: int) -> None:
    kill_with_parent()  # torch's own watch takes seconds, and prints tracebacks meanwhile
    leave_to_parent()
    if then is not None:
        then(worker)


def _shuffles(loader: DataLoader[Any]) -> bool:
    if isinstance(loader.sampler, RandomSampler):
        return True
    if isinstance(loader.sampler, SequentialSampler):
        return False
    raise ConfigError(
        f"the training loader has {a_or_an(type(loader.sampler).__name__)}: the order of samples is a function of "
        f"seed and "
        f"samples consumed, so that a run can resume; give the loader shuffle=True or shuffle=False"
    )


def _check_kind(loader: Any, plan: Plan, word: str) -> None:
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"the {word} loader is {a_or_an(type(loader).__name__)}: it must be a torch.utils.data.DataLoader"
        )
    iterable = isinstance(loader.dataset, IterableDataset)
    if iterable and plan.topology.data_parallel_size > 1:
        raise ConfigError(
            f"the {word} data set {type(loader.dataset).__name__} is iterable: {plan.topology.data_parallel_size} "
            f"data-parallel ranks would all read the same samples; give it __getitem__ and __len__"
        )
    if not iterable and loader.batch_size is None:
        raise ConfigError(
            f"the {word} loader has a batch_sampler or batch_size=None: give it batch_size and shuffle, its order is "
            f"made here"
        )
