"""Images in tar shards."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from recipes.image_classification.data.base import SPLITS, ImageData, Sample
from recipes.image_classification.data.image_files import ImageFiles, skips
from recipes.image_classification.data.tar_index import TarIndex, load_tar_index
from shardwise.errors import ConfigError


class WebDataset(ImageData):
    """Tar shards `directory`/train-*.tar, validation-*.tar and test-*.tar, as far as they are there.

    classes.txt beside them, if it is there, names a class in each line, in the order of their numbers. A sample is two
    members of one name, `key.jpg` (or jpeg, png) and `key.cls` with the class's number as text. Where every member lies
    is read once and kept beside the shards, or in `cache_directory`, for as long as the shard's size and time of change
    stay the same: samples are then read at any place, in any order.
    """

    def __init__(
        self,
        directory: str,
        num_classes: int,
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        batch_size: int,
        channels: int = 3,
        num_workers: int = 0,
        on_undecodable: str = "stop",
        cache_directory: str | None = None,
    ) -> None:
        super().__init__(num_classes, channels, image_size, mean, std, batch_size, num_workers)
        self.directory = Path(directory)
        self.cache_directory = None if cache_directory is None else Path(cache_directory)
        self.skip = skips(on_undecodable)

    def check(self) -> None:
        """Indexes the shards, and raises `ConfigError` for one that is not as described."""
        made = [self.make_split(split) for split in SPLITS]
        if not any(made):
            raise ConfigError(f"{self.directory} has 0 shards: data.directory needs train-*.tar and validation-*.tar, "
                              f"or test-*.tar")  # fmt: skip

    def setup(self, stage: str) -> None:
        """Opens the splits that are there."""
        super().setup(stage)
        listed = self.directory / "classes.txt"
        if listed.is_file():
            self.class_names = listed.read_text(errors="replace").splitlines()

    def make_split(self, split: str) -> Dataset[Sample] | None:
        shards = sorted(self.directory.glob(f"{split}-*.tar"))
        if not shards:
            return None
        indices = [load_tar_index(shard, self.cache_directory) for shard in shards]
        for shard, index in zip(shards, indices, strict=True):
            outside = np.flatnonzero((index["labels"] < 0) | (index["labels"] >= self.num_classes))
            if len(outside):
                raise ConfigError(
                    f"{shard}: sample {os.fsdecode(bytes(index['names'][outside[0]]))} is of class "
                    f"{index['labels'][outside[0]]}, and data.num_classes={self.num_classes} has 0 to "
                    f"{self.num_classes - 1}: use a larger data.num_classes, or mend the shard"
                )
        return _TarImages(shards, indices, self.channels, self.image_size, self.skip)


class _TarImages(ImageFiles):
    def __init__(self, shards: list[Path], indices: list[TarIndex], *options: Any) -> None:
        self.shards = shards
        self.names, self.offsets, self.sizes, labels = (
            np.concatenate([index[name] for index in indices]) for name in ("names", "offsets", "sizes", "labels")
        )
        self.ends = np.cumsum([len(index["labels"]) for index in indices])
        super().__init__(labels, *options)

    def _shard(self, place: int) -> Path:
        return self.shards[int(np.searchsorted(self.ends, place, side="right"))]

    def where(self, place: int) -> str:
        return f"{self._shard(place)}: {os.fsdecode(bytes(self.names[place]))}"

    def content(self, place: int) -> bytes:
        # Opened each time: an open file would be shared, with its position, by every worker that is forked.
        with self._shard(place).open("rb") as file:
            file.seek(self.offsets[place])
            return file.read(self.sizes[place])
