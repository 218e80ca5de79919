"""Deals out the data of validation, test and prediction: each sample once, and equally many batches to each rank."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

from torch.utils.data import DataLoader

from shardwise.data.streams import Group, check_own_samples, check_same_order, evaluation_batches
from shardwise.data.user_loader import (
    attribute_of,
    draw_order,
    drawing_apart,
    is_stream,
    name_of,
    sampler_of,
    shuffles,
    with_batches,
    with_seeds,
    with_watched_workers,
)
from shardwise.distributed.rng import derived_seed
from shardwise.plan import Plan


class EvaluationLoader:
    """Gives a rank's share of a data set. Each sample is on one rank, and every rank gets equally many batches.

    Strategies that gather parameters need all ranks in every forward. A rank without samples left runs a padding batch,
    as large as a full one. `mark` is called for every batch, with whether it is padding. `limit`: the most batches of
    all ranks together. `part_of(batch)`: the part of a batch of whole sequences that this rank computes.
    """

    def __init__(
        self,
        loader: Any,
        plan: Plan,
        rank: int,
        mark: Callable[[bool], None],
        limit: int | None = None,
        group: Group = lambda: None,
        part_of: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self.part_of = part_of
        self.original, self.plan, self.rank, self.mark, self.limit, self.group = loader, plan, rank, mark, limit, group
        self.batches: list[Any] | None = None  # the batches of all ranks; None for a stream
        if is_stream(loader):
            check_own_samples(loader, plan)
            self.loader = with_watched_workers(loader, rank)
            return
        self.batches = _evaluation_keys(loader, plan, group)[:limit]
        ranks = plan.topology.data_parallel_size
        turns = math.ceil(len(self.batches) / ranks)
        padded = [*self.batches, *self.batches[:1] * (turns * ranks - len(self.batches))]
        seed = derived_seed(plan.seed, "evaluation")
        starts = [0, *accumulate(len(keys) if type(keys) is list else 1 for keys in padded)]
        mine = [with_seeds(padded[i], seed, starts[i]) for i in range(rank, len(padded), ranks)]
        self.loader = with_batches(loader, mine, derived_seed(seed, "workers", rank))

    def __getattr__(self, name: str) -> Any:
        return attribute_of(self, name)

    def __len__(self) -> int:
        if self.batches is None:
            raise TypeError(f"{name_of(self.original)} has no length that is known before it is read")
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self.batches is None:
            for batch, is_padding in evaluation_batches(self.loader, self.plan, self.rank, self.limit, self.group):
                self.mark(is_padding)
                yield self.part_of(batch)
            return
        for turn, batch in enumerate(drawing_apart(self.loader)):
            self.mark(self.number_of(turn) >= len(self.batches))
            yield self.part_of(batch)

    def number_of(self, turn: int) -> int:
        """The number of this rank's batch of `turn` among the batches of all ranks."""
        return turn * self.plan.topology.data_parallel_size + self.rank

    def samples_of(self, turn: int) -> list[Any] | None:
        """The data-set indices of this rank's batch: empty for padding, None if they are not known."""
        if self.batches is None or (self.original.batch_size is None and self.original.batch_sampler is None):
            return None
        number = self.number_of(turn)
        return list(self.batches[number]) if number < len(self.batches) else []


def _evaluation_keys(loader: DataLoader[Any], plan: Plan, group: Group) -> list[Any]:
    """For each batch of all ranks the keys of its samples, or one key if the data set gives whole batches.

    They are in the order of the data set, unless the loader has a sampler of its own. Collective if it has one.

    Raises:
        ConfigError: the sampler gives every rank another order.
    """
    if shuffles(loader) is None:
        keys = list(draw_order(loader, plan.seed, 0))
        digest = hashlib.sha256(repr(_plain(keys)).encode()).hexdigest()
        check_same_order(digest, type(sampler_of(loader)).__name__, "validation, test or prediction", group)
        if sampler_of(loader) is loader.batch_sampler:
            return [list(batch) for batch in keys]
    else:
        keys = list(range(len(loader.dataset)))  # type: ignore[arg-type]
    size = loader.batch_size
    if size is None:
        return keys
    end = len(keys) // size * size if loader.drop_last else len(keys)
    return [keys[start : start + size] for start in range(0, end, size)]


def _plain(key: Any) -> Any:
    """A key as what looks the same on every rank."""
    if hasattr(key, "__index__"):
        return operator.index(key)
    if isinstance(key, Iterable) and not isinstance(key, (str, bytes)):
        return [_plain(item) for item in key]
    return type(key).__name__ if " at 0x" in repr(key) else repr(key)
