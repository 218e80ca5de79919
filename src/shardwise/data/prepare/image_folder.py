"""Finds the images of a folder: their classes, their splits and their order."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from shardwise.data.prepare.image_report import SUFFIXES
from shardwise.data.prepare.worker import held_out_number
from shardwise.errors import ConfigError, count

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Image:
    """One file. Its order, its split and its key follow from `name`, its path below the folder of its split."""

    path: str
    name: str
    label: int
    size: int  # bytes


def find_images(source: Path, validation: float | None) -> tuple[list[str], dict[str, list[Image]], int]:
    """The names of the classes, the images of each split in their order, and the number of files of other kinds."""
    if not (source / "train").is_dir():
        classes = _classes(source)
        found, others = _images_below(source, classes)
        share = 0.05 if validation is None else validation
        held_out = [image for image in found if _chance(image) < share]
        kept = [image for image in found if _chance(image) >= share]
        if not held_out or not kept:
            raise ConfigError(
                f"validation={share:g} of {count(len(found), 'image')} leaves a split without images: give another "
                f"share, or more images"
            )
        return classes, {"train": kept, "validation": held_out}, others
    if validation is not None:
        raise ConfigError(f"validation={validation:g}: {source} has its own splits, {source / 'train'}; leave it out")
    splits: dict[str, list[Image]] = {}
    classes, others = _classes(source / "train"), 0
    for split in SPLITS:
        folder = source / split
        if split == "test" and not folder.is_dir():
            continue
        if split == "validation" and not folder.is_dir():
            raise ConfigError(f"{source} has train/ and no validation/: add it, or give input={source / 'train'}")
        if odd := only_in_one({"train": classes, split: _classes(folder)}):
            raise ConfigError(f"the classes of {source} differ: {odd}; every split needs the same classes")
        splits[split], more = _images_below(folder, classes)
        others += more
    return classes, splits, others


def only_in_one(splits: dict[str, list[str]]) -> str:
    """The classes that the other of two splits lacks: "c is in train only, d and 2 more are in validation only"."""
    told: list[str] = []
    for split, names in splits.items():
        odd = sorted(name for name in names if not all(name in others for others in splits.values()))
        if odd:
            told.append(f"{odd[0]} {f'and {len(odd) - 1:,} more are' if len(odd) > 1 else 'is'} in {split} only")
    return ", ".join(told)


def _classes(folder: Path) -> list[str]:
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read ({error.strerror}): check the path") from None
    if not names:
        raise ConfigError(f"{folder} has 0 class folders: images lie in {folder}/<class>/, or {folder}/train/<class>/")
    return names


def _images_below(folder: Path, classes: list[str]) -> tuple[list[Image], int]:
    """The images in the order of a hash of their names, so that each shard has images of all classes."""
    found: list[Image] = []
    others = 0
    for label, name in enumerate(classes):
        before = len(found)
        for entry in os.scandir(folder / name):
            if entry.name.lower().endswith(SUFFIXES) and entry.is_file():
                found.append(Image(entry.path, f"{name}/{entry.name}", label, entry.stat().st_size))
            else:
                others += 1
        if len(found) == before:
            raise ConfigError(
                f"class folder {folder / name} has 0 images ({', '.join(SUFFIXES)}): add some, or remove it from every "
                f"split"
            )
    return sorted(found, key=lambda image: (_chance(image), image.name)), others


def _chance(image: Image) -> float:
    return held_out_number(os.fsencode(image.name))
