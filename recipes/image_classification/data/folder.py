"""Images in a folder a class."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from recipes.image_classification.data.base import SPLITS, ImageData, Sample
from recipes.image_classification.data.decoding import SUFFIXES
from recipes.image_classification.data.image_files import ImageFiles, skips
from shardwise.errors import ConfigError, count


class ImageFolder(ImageData):
    """`directory`/train/<class>/*.jpg|jpeg|png and the same below validation and test, as far as they are there.

    A class's number is its place among the sorted folder names. Images that lie in `directory`/test itself, or in
    `directory` without any of the three, have no label: they can be predicted. `on_undecodable`: stop or skip (see
    `ImageFiles`).
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
        """Raises `ConfigError` unless all splits that are there have images of the same `num_classes` classes."""
        classes = {split: names for split in SPLITS if (names := self._classes(split))}
        if not classes and self._without_labels("test") is None:
            if not self.directory.is_dir():
                raise ConfigError(f"data.directory={self.directory}: there is no such folder")
            raise ConfigError(
                f"{self.directory} has no folder train, validation or test, and no images ({', '.join(SUFFIXES)}): "
                f"data.directory needs train/<class>/ and validation/<class>/ to train, test/<class>/ to test, or "
                f"images to predict"
            )
        first = next(iter(classes), "")
        for split, names in classes.items():
            if odd := only_in_one({first: classes[first], split: names}):
                raise ConfigError(
                    f"{self.directory / split} has {count(len(names), 'class folder')} and {first} "
                    f"{len(classes[first])}, and they differ: {odd}; every split needs the same classes"
                )
        if first and len(classes[first]) != self.num_classes:
            raise ConfigError(
                f"{self.directory / first} has {count(len(classes[first]), 'class folder')}, and data.num_classes="
                f"{self.num_classes}: use data.num_classes={len(classes[first])}"
            )
        for split in SPLITS:
            self.make_split(split)

    def setup(self, stage: str) -> None:
        """Opens the splits that are there; their folders name the classes."""
        super().setup(stage)
        self.class_names = next((names for split in SPLITS if (names := self._classes(split))), None)

    def make_split(self, split: str) -> Dataset[Sample] | None:
        folder = self.directory / split
        if classes := self._classes(split):
            found = [(f"{name}/{file}", label) for label, name in enumerate(classes) for file in _images(folder / name)]
            with_images = {name.partition("/")[0] for name, _ in found}
            # A class that is rare may have no image to test on.
            if empty := [name for name in classes if name not in with_images and (split != "test" or not found)]:
                raise ConfigError(
                    f"class folder {folder / empty[0]} has 0 images ({', '.join(SUFFIXES)}): add some, or remove it "
                    f"from every split"
                )
        else:
            without = self._without_labels(split)
            if without is None:
                return None
            folder, found = without, [(name, -1) for name in _images(without)]
        names, labels = np.array([os.fsencode(name) for name, _ in found]), np.array([label for _, label in found])
        return _FolderImages(folder, names, labels, self.channels, self.image_size, self.skip)

    def _classes(self, split: str) -> list[str]:
        """The class folders, sorted; empty if there is no such split, or if it has no labels."""
        folder = self.directory / split
        if not folder.exists():
            return []
        try:
            names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
        except OSError as error:
            raise ConfigError(f"cannot read {folder}: {error.strerror}; give another data.directory") from None
        if not names and self._without_labels(split) is None:
            raise ConfigError(f"{folder} has 0 class folders: images lie in {folder}/<class>/")
        return names

    def _without_labels(self, split: str) -> Path | None:
        """The folder whose images, which have no label, make up the test split; None: there is none."""
        if split != "test":
            return None
        has_splits = any((self.directory / name).exists() for name in SPLITS)
        folder = self.directory / split if has_splits else self.directory
        return folder if folder.is_dir() and _images(folder) else None


def only_in_one(splits: dict[str, list[str]]) -> str:
    """The classes that the other of two splits lacks: "c is in train only, d and 2 more are in validation only"."""
    told: list[str] = []
    for split, names in splits.items():
        odd = sorted(name for name in names if not all(name in others for others in splits.values()))
        if odd:
            told.append(f"{odd[0]} {f'and {len(odd) - 1:,} more are' if len(odd) > 1 else 'is'} in {split} only")
    return ", ".join(told)


def _images(folder: Path) -> list[str]:
    try:
        return sorted(file for file in os.listdir(folder) if file.lower().endswith(SUFFIXES))
    except OSError as error:
        raise ConfigError(f"cannot read {folder}: {error.strerror}; give another data.directory") from None


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
