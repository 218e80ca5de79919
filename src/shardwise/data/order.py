"""Computes which samples each step takes, from the seed, the epoch and the training clock (samples consumed)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.errors import ConfigError, count

_ROUNDS = 6


def permute(index: npt.NDArray[np.int64], size: int, key: int) -> npt.NDArray[np.int64]:
    """Map `index` by a permutation of range(size) that `key` chooses, without a table.

    This is a Feistel network over the next even power of two, applied until the value is below `size` (cycle walking,
    Black and Rogaway 2002). A billion samples need no memory, and the order is the same on every platform and version.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = splitmix64(np.uint64(key) ^ np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    value = index.astype(np.uint64)
    outside = np.ones(len(value), dtype=bool)
    while outside.any():
        left, right = value[outside] >> np.uint64(half), value[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (splitmix64(right ^ round_key) & mask)
        value[outside] = (left << np.uint64(half)) | right
        outside = value >= np.uint64(size)
    return value.astype(np.int64)


def splitmix64(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finalizer of splitmix64 (Steele et al. 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@dataclass(frozen=True)
class GlobalOrder:
    """The global order of samples, cut into global batches. The incomplete last batch of an epoch is dropped."""

    samples: int  # the size of the data set
    global_batch_size: int
    shuffle: bool
    seed: int
    max_steps_per_epoch: int | None = None  # an epoch ends there, with samples from the whole data set
    # Gives the samples at positions of the run, where the data set says them itself. No epoch begins anew then.
    draw: Callable[[int, npt.NDArray[np.int64]], npt.NDArray[np.int64]] | None = None

    def __post_init__(self) -> None:
        if self.samples < self.global_batch_size:
            raise ConfigError(
                f"the training set has {count(self.samples, 'sample')}, less than one global_batch_size="
                f"{self.global_batch_size}: use a smaller one, and a smaller micro_batch_size where that is larger"
            )

    @property
    def steps_per_epoch(self) -> int:
        steps = self.samples // self.global_batch_size
        return steps if self.max_steps_per_epoch is None else min(steps, self.max_steps_per_epoch)

    @property
    def samples_per_epoch(self) -> int:
        return self.steps_per_epoch * self.global_batch_size

    def indices(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """The data-set indices of the `count` samples after `start` consumed ones, all within one epoch."""
        if self.draw is not None:
            return self.draw(self.seed, np.arange(start, start + count, dtype=np.int64))
        epoch, position = divmod(start, self.samples_per_epoch)
        positions = np.arange(position, position + count, dtype=np.int64)
        if not self.shuffle:
            return positions
        key = int(
            splitmix64(np.array([self.seed, epoch], dtype=np.uint64) + np.uint64(1)) @ np.array([1, 3], np.uint64)
        )
        return permute(positions, self.samples, key)

    def micro_batches(self, start: int, count: int, rank: int, ranks: int, size: int) -> npt.NDArray[np.int64]:
        """int64 [count / (ranks * size), size]: rank `rank`'s micro-batches of the `count` samples from `start` on."""
        return self.indices(start, count).reshape(-1, ranks, size)[:, rank]


class DrawnOrder:
    """The order that a sampler gives. It is drawn one epoch at a time, and dealt out like `GlobalOrder`.

    `draw(epoch)`: gives the keys of an epoch, the same on every rank. Each epoch is drawn once, one after the other,
    also if the run is resumed in a later one, since a sampler may count its epochs. `samples` and `global_batch_size`
    are numbers of keys.
    """

    def __init__(
        self, draw: Callable[[int], Sequence[Any]], global_batch_size: int, name: str, most: int | None = None
    ) -> None:
        self.draw, self.global_batch_size, self.name = draw, global_batch_size, name
        self.most = most  # the most steps of an epoch
        self._epochs: dict[int, npt.NDArray[Any]] = {}  # the last few, which may be needed again
        first = self._keys(0)
        self.samples = len(first)
        if self.samples < global_batch_size:
            raise ConfigError(
                f"the training loader's {name} gives {self.samples} samples or batches an epoch, and one step takes "
                f"{global_batch_size}: use a smaller global_batch_size"
            )
        content = first.tobytes() if first.dtype == np.int64 else repr(first.tolist()).encode()
        self.digest = hashlib.sha256(content).hexdigest()  # the digest of the first epoch

    @property
    def steps_per_epoch(self) -> int:
        steps = self.samples // self.global_batch_size
        return steps if self.most is None else min(steps, self.most)

    @property
    def samples_per_epoch(self) -> int:
        return self.steps_per_epoch * self.global_batch_size

    def micro_batches(self, start: int, count: int, rank: int, ranks: int, size: int) -> npt.NDArray[Any]:
        """[count / (ranks * size), size]: rank `rank`'s micro-batches of the `count` keys from `start` on."""
        epoch, position = divmod(start, self.samples_per_epoch)
        return self._keys(epoch)[position : position + count].reshape(-1, ranks, size)[:, rank]

    def _keys(self, epoch: int) -> npt.NDArray[Any]:
        for number in range(max(self._epochs, default=-1) + 1, epoch + 1):
            self._epochs[number] = _as_array(self.draw(number))
            self._epochs.pop(number - 4, None)
            if len(self._epochs[number]) < getattr(self, "samples", 0):
                raise ConfigError(
                    f"the training loader's {self.name} gives {len(self._epochs[number])} samples or batches in epoch "
                    f"{number + 1}, and gave {self.samples} in the first: an epoch must always be as long"
                )
        return self._epochs[epoch]


def _as_array(keys: Sequence[Any]) -> npt.NDArray[Any]:
    """An array [number of keys]: int64 if they are indices, else objects."""
    try:
        return np.fromiter((key.__index__() for key in keys), np.int64, len(keys))
    except (AttributeError, TypeError):
        array = np.empty(len(keys), object)
        for number, key in enumerate(keys):
            array[number] = key
        return array
