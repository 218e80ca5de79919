"""The training clock: which samples make up which step. Pure arithmetic on (seed, epoch, samples consumed)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.errors import ConfigError, count

_ROUNDS = 6


def permute(index: npt.NDArray[np.int64], size: int, key: int) -> npt.NDArray[np.int64]:
    """The images of `index` under a permutation of range(size) chosen by `key`, without a table.

    A Feistel network over the next even power of two, walked until it lands below `size` (cycle walking, Black and
    Rogaway 2002): a billion samples cost no memory, and the order is the same on every platform and version.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = _mix(np.uint64(key) ^ np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    value = index.astype(np.uint64)
    outside = np.ones(len(value), dtype=bool)
    while outside.any():
        left, right = value[outside] >> np.uint64(half), value[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        value[outside] = (left << np.uint64(half)) | right
        outside = value >= np.uint64(size)
    return value.astype(np.int64)


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finalizer (Steele et al. 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@dataclass(frozen=True)
class GlobalOrder:
    """The global order of samples, cut into global batches. The incomplete last batch of an epoch is dropped."""

    samples: int  # in the data set
    global_batch_size: int
    shuffle: bool
    seed: int
    max_steps_per_epoch: int | None = None  # an epoch ends there; each draws its samples from the whole data set

    def __post_init__(self) -> None:
        if self.samples < self.global_batch_size:
            raise ConfigError(
                f"the training set has {count(self.samples, 'sample')}, less than one global_batch_size="
                f"{self.global_batch_size}: use a smaller one"
            )

    @property
    def steps_per_epoch(self) -> int:
        steps = self.samples // self.global_batch_size
        return steps if self.max_steps_per_epoch is None else min(steps, self.max_steps_per_epoch)

    @property
    def samples_per_epoch(self) -> int:
        return self.steps_per_epoch * self.global_batch_size

    def indices(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Data-set indices of the `count` samples after `start` consumed ones, all within one epoch."""
        epoch, position = divmod(start, self.samples_per_epoch)
        places = np.arange(position, position + count, dtype=np.int64)
        if not self.shuffle:
            return places
        key = int(_mix(np.array([self.seed, epoch], dtype=np.uint64) + np.uint64(1)) @ np.array([1, 3], np.uint64))
        return permute(places, self.samples, key)

    def micro_batches(self, start: int, count: int, rank: int, ranks: int, size: int) -> npt.NDArray[np.int64]:
        """int64 [count / (ranks * size), size]: rank `rank`'s micro-batches of the `count` samples from `start` on."""
        return self.indices(start, count).reshape(-1, ranks, size)[:, rank]
