"""Reads the settings of the user's DataLoader, and copies it with another order of batches."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)

from shardwise.config.targets import locate
from shardwise.data.sample_seeds import SeededSamples
from shardwise.distributed.rng import derived_seed, seed_host
from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.process.parent import kill_with_parent
from shardwise.process.signals import leave_to_parent


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
