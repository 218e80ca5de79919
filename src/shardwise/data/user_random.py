"""Gives the user's data random streams of its own, apart from those of training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from shardwise.data.user_loader import sampler_of
from shardwise.distributed.rng import derived_seed, random_state, seed_host, set_random_state

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
