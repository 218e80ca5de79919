"""Images in a folder a class."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from recipes.image_classification.data.base import ImageData, Sample
from recipes.image_classification.data.decoding import SUFFIXES
from recipes.image_classification.data.image_files import ImageFiles, skips
from shardwise.data.prepare.image_folder import only_in_one
from shardwise.errors import ConfigError, count


class ImageFolder(ImageData):
    """`directory`/train/<class>/*.jpg|jpeg|png and the same below validation and, if there is one, test.

    A class's number is its place among the sorted folder names. `on_undecodable`: stop or skip (see `ImageFiles`).
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
    ) -> None:
        super().__init__(num_classes, channels, image_size, mean, std, batch_size, num_workers)
        self.directory = Path(directory)
        self.skip = skips(on_undecodable)

    def check(self) -> None:
        """Raises `ConfigError` unless every split has images of the same `num_classes` classes."""
        classes = {split: names for split in ("train", "validation", "test") if (names := self._classes(split))}
        for split, names in classes.items():
            if odd := only_in_one({"train": classes["train"], split: names}):
                raise ConfigError(
                    f"{self.directory / split} has {count(len(names), 'class folder')} and train "
                    f"{len(classes['train'])}, and they differ: {odd}; every split needs the same classes"
                )
        if len(classes["train"]) != self.num_classes:
            raise ConfigError(
                f"{self.directory / 'train'} has {count(len(classes['train']), 'class folder')}, and data.num_classes="
                f"{self.num_classes}: use data.num_classes={len(classes['train'])}"
            )
        for split in classes:
            self.make_split(split)

    def make_split(self, split: str) -> Dataset[Sample] | None:
        names: list[bytes] = []
        labels: list[int] = []
        for label, name in enumerate(classes := self._classes(split)):
            folder = self.directory / split / name
            files = sorted(file for file in os.listdir(folder) if file.lower().endswith(SUFFIXES))
            if not files:
                raise ConfigError(
                    f"class folder {folder} has 0 images ({', '.join(SUFFIXES)}): add some, or remove it from every "
                    f"split"
                )
            names += [os.fsencode(f"{name}/{file}") for file in files]
            labels += [label] * len(files)
        if not classes:
            return None
        return _FolderImages(
            self.directory / split, np.array(names), np.array(labels), self.channels, self.image_size, self.skip
        )

    def _classes(self, split: str) -> list[str]:
        folder = self.directory / split
        if split == "test" and not folder.exists():
            return []
        try:
            names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        except OSError as error:
            raise ConfigError(
                f"cannot read {folder}: {error.strerror}; data.directory needs train/<class>/ and validation/<class>/"
            ) from None
        if not names:
            raise ConfigError(f"{folder} has 0 class folders: images lie in {folder}/<class>/")
        return names


class _FolderImages(ImageFiles):
    def __init__(
        self, folder: Path, names: npt.NDArray[np.bytes_], labels: npt.NDArray[np.int64], *options: Any
    ) -> None:
        super().__init__(labels, *options)
        # One array: a list of a million names would be copied into every worker, as its reference counts change.
        self.folder, self.names = folder, names

    def where(self, place: int) -> str:
        return str(self.folder / os.fsdecode(bytes(self.names[place])))

    def content(self, place: int) -> bytes:
        return Path(self.where(place)).read_bytes()
