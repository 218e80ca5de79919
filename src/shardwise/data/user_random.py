"""Gives the user's data random streams of its own, apart from those of training."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from shardwise.data.user_loader import sampler_of
from shardwise.distributed.rng import derived_seed, random_state, set_random_state

_CPU = torch.device("cpu")


class RandomStreams:
    """Random streams on the host for the data alone: inside the context it draws from these, not from training's."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.state: dict[str, Any] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        outside = random_state(_CPU)
        if self.state is None:
            torch.default_generator.manual_seed(self.seed)
            random.seed(self.seed)
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed(self.seed % 2**32)
        else:
            set_random_state(self.state, _CPU)
        try:
            yield
        finally:
            self.state = random_state(_CPU)
            set_random_state(outside, _CPU)


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
