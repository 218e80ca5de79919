"""Reads the settings of the user's DataLoader, and copies it with another order of batches."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    get_worker_info,
)

from shardwise.config.targets import locate
from shardwise.data.order import splitmix64
from shardwise.distributed.rng import derived_seed, random_state, seed_host, set_random_state
from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.process.signals import kill_with_parent, leave_to_parent


class Batches:
    """A batch sampler that calls `make` for each pass, which can start at the training clock."""

    def __init__(self, make: Callable[[], Iterator[Any]], length: int) -> None:
        self.make, self.length = make, length

    def __iter__(self) -> Iterator[Any]:
        return self.make()

    def __len__(self) -> int:
        return self.length


def is_stream(loader: Any) -> bool:
    """Whether a loader keeps an order of its own, because its samples cannot be read by an index."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return True
    try:
        len(sampler_of(loader))
    except (TypeError, NotImplementedError):
        return True
    return False


def attribute_of(loader: Any, name: str) -> Any:
    """The attribute `name` of the user's loader that `loader` replaces."""
    if name.startswith("__") or "original" not in vars(loader):
        raise AttributeError(name)
    return getattr(loader.original, name)


def sampler_of(loader: DataLoader[Any]) -> Any:
    """The object that gives the order: the user's batch sampler, or else the sampler."""
    return loader.batch_sampler if loader.batch_size is None and loader.batch_sampler is not None else loader.sampler


def shuffles(loader: DataLoader[Any]) -> bool | None:
    """Whether the loader shuffles; None if its sampler gives an order of its own."""
    sampler: Any = sampler_of(loader)
    samples = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
    if type(sampler) is DistributedSampler:  # shardwise deals samples out by itself
        return bool(sampler.shuffle)
    if len(sampler) == samples and type(sampler) in (RandomSampler, SequentialSampler):
        replaces = getattr(sampler, "replacement", False)
        return None if replaces else type(sampler) is RandomSampler
    return None


def with_batches(loader: DataLoader[Any], batches: Any, seed: int) -> DataLoader[Any]:
    """Copy the loader with another order.

    `batches`: lists of keys, or single ones if it does not collate, which may have seeds. `seed`: of the workers."""
    order: dict[str, Any] = {"batch_sampler": batches}
    if loader.batch_sampler is None:
        order = {"sampler": batches, "batch_size": None}
    # Without a generator each pass would draw from the random stream of dropout, and a resumed run from another place.
    generator = torch.Generator().manual_seed(seed)
    start_worker, samples = partial(_start_worker, loader.worker_init_fn), SeededSamples(loader.dataset)
    if _overrides_iteration(loader):
        return _copy_with(loader, {**order, "dataset": samples, "generator": generator, "worker_init_fn": start_worker})
    return DataLoader(
        samples,  # type: ignore[arg-type]  # it has what a Dataset has, and is in no one's registry
        **order,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=start_worker,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        generator=generator,
    )


def _overrides_iteration(loader: DataLoader[Any]) -> bool:
    kind = type(loader)
    if kind.__module__.startswith("torchdata."):  # its state is not needed if the order is given
        return False
    return kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator


def _copy_with(loader: DataLoader[Any], changed: dict[str, Any]) -> DataLoader[Any]:
    """Copy a loader whose class overrides iteration, with another order."""
    copied = copy.copy(loader)
    if (batches := changed.get("batch_sampler")) is not None:
        changed |= {"sampler": SequentialSampler(batches), "batch_size": None, "drop_last": False}
    vars(copied).update(changed | {"_iterator": None})  # DataLoader refuses to set these attributes
    return copied


def with_watched_workers(loader: Any, rank: int) -> Any:
    """Watch the workers of a stream, which draw other random numbers on every rank."""
    if isinstance(loader, DataLoader) and loader.num_workers:
        loader.worker_init_fn = partial(_start_worker, loader.worker_init_fn)
        loader.collate_fn = _Collate(loader.collate_fn, rank)
    return loader


class _Collate:
    """The user's function. Ranks draw alike until a worker's first batch: see `Stream._draw_apart`."""

    def __init__(self, collate: Callable[[Any], Any], rank: int) -> None:
        self.collate, self.rank, self.draws_alike = collate, rank, True

    def __call__(self, samples: Any) -> Any:
        batch = self.collate(samples)
        if self.draws_alike:
            self.draws_alike = False
            seed_host(derived_seed(torch.initial_seed(), "rank", self.rank))
        return batch


def _start_worker(then: Callable[[int], None] | None, worker: int) -> None:
    kill_with_parent()  # torch's own check takes seconds, and prints tracebacks
    leave_to_parent()
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, SeededSamples):
        object.__setattr__(info, "dataset", info.dataset.samples)  # the user's code may prepare it
    if then is not None:
        then(worker)


def check_batch_size(loader: Any, plan: Plan) -> None:
    size = getattr(loader, "batch_size", None)
    if not isinstance(loader, DataLoader) or size in (None, plan.micro_batch_size):
        return
    options, ranks = _options_for_batch_size(plan), plan.topology.world_size
    given = (data := plan.data or {}).get("batch_size")
    if ranks > 1 and isinstance(given, int) and given // ranks == size:  # as DataModules for a Trainer with ranks do
        raise ConfigError(
            f"the training loader's batch_size is {size}, and micro_batch_size={plan.micro_batch_size}: "
            f"{data['_target_']} divides data.batch_size={given} by the {ranks} ranks; give "
            f"data.batch_size={plan.micro_batch_size * ranks}"
        )
    named = f"'{options[0]}=${{micro_batch_size}}' (in quotes, as the shell would read ${{…}}), or " if options else ""
    raise ConfigError(
        f"the training loader's batch_size is {size}, and micro_batch_size={plan.micro_batch_size}: make them equal: "
        f"{named}micro_batch_size={size}"
    )


def _options_for_batch_size(plan: Plan) -> list[str]:
    """The arguments of the data and of the module that are named like a batch size."""
    found = []
    for word, node in (("data", plan.data), ("module", plan.module)):
        if not node or "_target_" not in node:
            continue
        try:
            names = [*node, *inspect.signature(locate(node["_target_"], word)).parameters]
        except (ValueError, ConfigError):
            names = list(node)
        found += [f"{word}.{name}" for name in dict.fromkeys(names) if name in ("batch_size", "train_batch_size")]
    return found


def name_of(loader: Any) -> str:
    """The name of the data in messages."""
    if isinstance(loader, DataLoader) and type(loader) is DataLoader:
        return type(loader.dataset).__name__
    return type(loader).__name__


# Seeds the random numbers of the host anew for each sample that is read, from its position in the run.


class Keys(list[Any]):
    """The keys of a batch's samples, with a seed for each."""

    seeds: list[int]


class Key(NamedTuple):
    """One key of a data set that gives whole batches, with its seed."""

    key: Any
    seed: int


def with_seeds(keys: Any, seed: int, position: int) -> Keys | Key:
    """Add seeds to the keys of a batch, whose first sample has this position, or to a single key."""
    if type(keys) is not list:
        return Key(keys, _seeds(seed, position, 1)[0])
    seeded = Keys(keys)
    seeded.seeds = _seeds(seed, position, len(keys))
    return seeded


def _seeds(seed: int, position: int, count: int) -> list[int]:
    at = np.arange(position + 1, position + 1 + count, dtype=np.uint64)
    seeds: list[int] = (splitmix64(np.uint64(seed) ^ at * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(1)).tolist()
    return seeds


class SeededSamples:
    """The user's data set: torch, NumPy and Python draw from a sample's own seed while it is read.

    What then collates a batch draws from a stream that begins with the batch's first sample.
    """

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "samples":  # it is being unpickled
            raise AttributeError(name)
        return getattr(self.samples, name)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: Any) -> Any:
        if type(key) is Keys:  # one key that is a list
            seed_host(key.seeds[0])
            return self.samples[list(key)]
        if type(key) is Key:
            seed_host(key.seed)
            return self.samples[key.key]
        return self.samples[key]  # a loader that iterates in a way of its own

    def __getitems__(self, keys: Keys) -> Any:
        if _reads_many(self.samples):
            seed_host(keys.seeds[0])
            read = self.samples.__getitems__(list(keys))
        else:
            read = []
            for key, seed in zip(keys, keys.seeds, strict=True):
                seed_host(seed)
                read.append(self.samples[key])
        seed_host(keys.seeds[0] ^ 1)
        return read


def _reads_many(samples: Any) -> bool:
    """Whether the data set reads the samples of a batch in one call of its own. A Subset only passes it on."""
    while type(samples) is Subset:
        samples = samples.dataset
    return callable(getattr(samples, "__getitems__", None))


# Gives the user's data random streams of its own, apart from those of training.

_CPU = torch.device("cpu")
_END = object()


@contextmanager
def _training_left_alone() -> Iterator[None]:
    outside = random_state(_CPU)
    try:
        yield
    finally:
        set_random_state(outside, _CPU)


class RandomStreams:
    """Random streams on the host for the data alone: inside the context it draws from these, not from training's."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.state: dict[str, Any] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with _training_left_alone():
            if self.state is None:
                seed_host(self.seed)
            else:
                set_random_state(self.state, _CPU)
            try:
                yield
            finally:
                self.state = random_state(_CPU)


def set_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of the loader and its parts, if they have it."""
    sampler, of_batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    for part in (loader, getattr(loader, "dataset", None), sampler, of_batches, getattr(of_batches, "sampler", None)):
        if callable(method := getattr(part, "set_epoch", None)):
            method(epoch)


def draw_order(loader: DataLoader[Any], seed: int, epoch: int) -> Sequence[Any]:
    """Draw an epoch from the user's sampler: indices, or batches of them. It depends on seed and epoch alone."""
    sampler = sampler_of(loader)
    with RandomStreams(derived_seed(seed, "order", epoch))():
        for part in (sampler, getattr(sampler, "sampler", None)):
            if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                generator.manual_seed(derived_seed(seed, "order", epoch))
        set_epoch(loader, epoch)
        return list(sampler)


def drawing_apart(loader: DataLoader[Any]) -> Iterator[Any]:
    """Iterate over a loader whose samples have seeds of their own, and leave training's random streams as they are."""
    if loader.num_workers:
        yield from loader
        return
    with _training_left_alone():
        batches = iter(loader)
    while True:
        with _training_left_alone():
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch
