"""Seeds the random numbers of the host anew for each sample that is read, from its position in the run."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Subset

from shardwise.data.order import splitmix64
from shardwise.distributed.rng import seed_host


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
