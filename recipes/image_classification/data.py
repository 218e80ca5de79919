"""The data: scikit-learn's digits, a folder of images a class, tar shards, or noise for measuring.

Every data set is indexed (`__getitem__`, `__len__`): which sample comes when is the library's, a function of seed and
samples consumed. Workers decode to uint8 of one size; everything random happens later, on the device (augment.py).
"""

import io
import os
import sys
import tarfile
import uuid
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning import LightningDataModule
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from shardwise.data.order import permute
from shardwise.errors import ConfigError, DataError, count

SUFFIXES = (".jpg", ".jpeg", ".png")
INDEX_VERSION = 2
# What Pillow raises for a file that is not an image, is cut short or would be larger than memory.
UNDECODABLE = (OSError, SyntaxError, ValueError, EOFError, ArithmeticError, LookupError, Image.DecompressionBombError)

Sample = dict[str, Any]


class UndecodableImage(DataError):
    """A file that should be an image. Of what a worker's traceback adds to the message, only the message is kept."""

    def __init__(self, message: str) -> None:
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())


class ImageData(LightningDataModule):
    """Loaders over `splits`; `mean` and `std` (a channel each) are the module's to use, and are kept with the data."""

    def __init__(
        self,
        num_classes: int,
        channels: int,
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        batch_size: int,
        num_workers: int,
    ) -> None:
        super().__init__()
        for name, value in (("num_classes", num_classes), ("image_size", image_size)):
            if value < 1:
                raise ConfigError(f"data.{name}={value}: must be at least 1")
        if num_workers < 0:
            raise ConfigError(f"data.num_workers={num_workers}: must be at least 0")
        if channels not in (1, 3):
            raise ConfigError(f"data.channels={channels}: must be 3 (RGB) or 1 (grey)")
        self.num_classes, self.channels, self.image_size = num_classes, channels, image_size
        self.batch_size, self.num_workers = batch_size, num_workers
        self.mean, self.std = mean, std
        self.splits: dict[str, Dataset[Sample]] = {}

    def make_split(self, split: str) -> Dataset[Sample] | None:
        """The data set of "train", "validation" or "test"; None where there is no test split."""
        raise NotImplementedError

    def check_fits(self, num_classes: int, in_channels: int, image_size: int | None) -> None:
        """Raises `ConfigError` if a model of these sizes (of any image size: None) cannot take the data."""
        for ours, value, theirs, needed in (
            ("num_classes", self.num_classes, "num_classes", num_classes),
            ("channels", self.channels, "in_channels", in_channels),
            ("image_size", self.image_size, "image_size", image_size),
        ):
            if needed is not None and value != needed:
                raise ConfigError(
                    f"data.{ours}={value} and model.{theirs}={needed} are not equal: use model.{theirs}={value}"
                )

    def setup(self, stage: str) -> None:
        """Opens the splits."""
        made = {split: self.make_split(split) for split in ("train", "validation", "test")}
        self.splits = {split: dataset for split, dataset in made.items() if dataset is not None}

    def train_dataloader(self) -> DataLoader[Sample]:
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[Sample]:
        return self._loader("validation", shuffle=False)

    def test_dataloader(self) -> DataLoader[Sample]:
        if "test" not in self.splits:
            raise ConfigError("the data has no test split: add one, or use stage=validate")
        return self._loader("test", shuffle=False)

    def predict_dataloader(self) -> DataLoader[Sample]:
        return self._loader("test" if "test" in self.splits else "validation", shuffle=False)

    def _loader(self, split: str, *, shuffle: bool) -> DataLoader[Sample]:
        return DataLoader(
            self.splits[split],
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            drop_last=False,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
        )


class InMemory(Dataset[Sample]):
    """Images that are there already: uint8 [N, C, H, W], repeated to `length` samples."""

    def __init__(self, images: Tensor, labels: Tensor, length: int | None = None) -> None:
        self.images, self.labels, self.length = images, labels, length or len(images)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        place = range(self.length)[index] % len(self.images)  # past the end: IndexError
        return {"image": self.images[place], "label": self.labels[place], "index": index}


class Digits(ImageData):
    """scikit-learn's 1,797 handwritten digits of 8×8 grey pixels: 70 % train, 15 % validation, 15 % test."""

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        batch_size: int,
        num_classes: int = 10,
        channels: int = 1,
        image_size: int = 8,
        num_workers: int = 0,
    ) -> None:
        super().__init__(num_classes, channels, image_size, mean, std, batch_size, num_workers)
        if (num_classes, channels, image_size) != (10, 1, 8):
            raise ConfigError(
                f"data.num_classes={num_classes} data.channels={channels} data.image_size={image_size}: the digits "
                f"are what they are; leave them at 10, 1 and 8"
            )

    def make_split(self, split: str) -> Dataset[Sample]:
        # Here, since it takes a second that other data need not spend.
        try:
            from sklearn.datasets import load_digits  # type: ignore[import-untyped]
        except ImportError as error:
            raise ConfigError(f"data=digits needs scikit-learn ({error}): pip install -r requirements.txt") from None

        digits = load_digits()
        total = len(digits.images)
        order = permute(np.arange(total, dtype=np.int64), total, key=0)  # the same on every platform, unlike numpy's
        borders = {"train": (0, 0.7), "validation": (0.7, 0.85), "test": (0.85, 1)}[split]
        chosen = order[round(total * borders[0]) : round(total * borders[1])]
        pixels = (digits.images[chosen] * (255 / 16)).round().astype(np.uint8)
        labels = digits.target[chosen].astype(np.int64)
        return InMemory(torch.from_numpy(pixels)[:, None], torch.from_numpy(labels))


class SyntheticImages(ImageData):
    """Noise, for measuring: `distinct` random images made once in memory, handed out `samples` times an epoch."""

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        batch_size: int,
        num_classes: int = 1000,
        channels: int = 3,
        image_size: int = 224,
        samples: int = 65536,
        distinct: int = 256,
        validation_samples: int = 1024,
        num_workers: int = 0,
    ) -> None:
        super().__init__(num_classes, channels, image_size, mean, std, batch_size, num_workers)
        for name, value in (("samples", samples), ("distinct", distinct), ("validation_samples", validation_samples)):
            if value < 1:
                raise ConfigError(f"data.{name}={value}: must be at least 1")
        self.samples, self.distinct, self.validation_samples = samples, distinct, validation_samples

    def setup(self, stage: str) -> None:
        """Makes the images once, for all splits."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.distinct, self.channels, self.image_size, self.image_size)
        self.images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self.labels = torch.randint(0, self.num_classes, shape[:1], generator=generator)
        super().setup(stage)

    def make_split(self, split: str) -> Dataset[Sample]:
        return InMemory(self.images, self.labels, self.samples if split == "train" else self.validation_samples)


class ImageFiles(Dataset[Sample]):
    """Images that are decoded when they are asked for.

    One that cannot be decoded stops the run, or (`skip`) the next that can takes its place, whatever the worker; each
    is counted, and named on stderr once a rank.
    """

    def __init__(self, labels: npt.NDArray[np.int64], channels: int, image_size: int, skip: bool) -> None:
        self.labels, self.mode, self.image_size, self.skip = labels, {1: "L", 3: "RGB"}[channels], image_size, skip
        self.undecodable = torch.zeros(len(labels), dtype=torch.bool)
        self.undecodable.share_memory_()  # type: ignore[no-untyped-call] # seen by every worker

    def __len__(self) -> int:
        return len(self.labels)

    def content(self, place: int) -> bytes:
        """The encoded image."""
        raise NotImplementedError

    def where(self, place: int) -> str:
        """What a reader needs to find the image."""
        raise NotImplementedError

    def skipped(self) -> int:
        """Undecodable images met so far by this rank."""
        return int(self.undecodable.sum())

    def __getitem__(self, index: int) -> Sample:
        start = range(len(self))[index]  # past the end: IndexError
        for further in range(len(self)):
            place = (start + further) % len(self)
            if not self.undecodable[place] and (image := self._decode(place)) is not None:
                # The index is the one asked for: a stand-in is augmented in its own way.
                return {"image": image, "label": int(self.labels[place]), "index": index}
        raise UndecodableImage(
            f"none of {count(len(self), 'image')} can be decoded, {self.where(0)} among them; look at them"
        )

    def _decode(self, place: int) -> Tensor | None:
        try:
            content = self.content(place)
        except OSError as error:  # a file that cannot be read may be there tomorrow: never skipped
            raise UndecodableImage(f"{self.where(place)} cannot be read: {error.strerror or error}") from None
        try:
            return decode(content, self.mode, self.image_size)
        except UNDECODABLE as error:
            known = not isinstance(error, UnidentifiedImageError)  # it would name an address in memory
            why = " ".join(str(error).split()) if known else "not an image that Pillow knows"
            said = f"{self.where(place)} ({len(content):,} bytes) cannot be decoded: {why}"
            if not self.skip:
                raise UndecodableImage(
                    f"{said}; mend or remove it, or use data.on_undecodable=skip to put the next image in its place"
                ) from None
            self.undecodable[place] = True
            print(f"shardwise: {said}; skipped ({self.skipped()} so far)", file=sys.stderr, flush=True)
            return None


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
            if odd := sorted(set(names) ^ set(classes["train"])):
                has = split if odd[0] in names else "train"
                raise ConfigError(
                    f"{self.directory / split} has {count(len(names), 'class folder')} and train "
                    f"{len(classes['train'])}, and "
                    f"they differ: {odd[0]} is in {has} only; every split needs the same classes"
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


class WebDataset(ImageData):
    """Tar shards `directory`/train-*.tar, validation-*.tar and, if there are any, test-*.tar.

    A sample is two members of one name, `key.jpg` (or jpeg, png) and `key.cls` with the class's number as text. Where
    every member lies is read once and kept beside the shards, or in `cache_directory`, for as long as the shard's size
    and time of change stay the same: samples are then read at any place, in any order.
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
        for split in ("train", "validation", "test"):
            self.make_split(split)

    def make_split(self, split: str) -> Dataset[Sample] | None:
        shards = sorted(self.directory.glob(f"{split}-*.tar"))
        if not shards:
            if split == "test":
                return None
            raise ConfigError(f"{self.directory} has 0 shards {split}-*.tar: data.directory needs train-*.tar and "
                              f"validation-*.tar")  # fmt: skip
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


TarIndex = dict[str, npt.NDArray[Any]]  # names, offsets, sizes, labels: a sample each


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


def load_tar_index(shard: Path, cache_directory: Path | None) -> TarIndex:
    """The shard's index from its cache, or read off the shard and cached; harmless when several ranks do so at once."""
    status = shard.stat()
    key = np.array([INDEX_VERSION, status.st_size, status.st_mtime_ns])
    cache = (cache_directory or shard.parent) / f"{shard.name}.index.npz"
    try:
        with cache.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            if np.array_equal(file["key"], key):
                return {name: file[name] for name in ("names", "offsets", "sizes", "labels")}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass  # not there, or cut short: it is made again
    index = read_tar_index(shard)
    temporary = cache.with_name(f".{cache.name}.{uuid.uuid4().hex}")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as target:
            np.savez(target, allow_pickle=False, key=key, **index)
        os.replace(temporary, cache)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        print(f"shardwise: cannot keep {cache}: {error.strerror}; every rank reads the whole shard. Give "
              f"data.cache_directory=", file=sys.stderr, flush=True)  # fmt: skip
    return index


def read_tar_index(shard: Path) -> TarIndex:
    """Every sample of an uncompressed tar: the image's name, where its bytes are, and the label beside it.

    Raises:
        ConfigError: no tar, cut short, or a sample that is not an image and a class's number.
    """
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                folder, _, file = member.name.rpartition("/")
                stem, _, suffix = file.partition(".")
                name, suffix = f"{folder}/{stem}", f".{suffix.lower()}"
                if not member.isfile() or not (suffix in SUFFIXES or suffix == ".cls"):
                    continue
                if name in (images if suffix in SUFFIXES else labels):
                    raise ConfigError(f"{shard}: {member.name} is the second {suffix} of its sample: names are unique")
                if suffix in SUFFIXES:
                    images[name] = member
                    continue
                content = tar.extractfile(member)
                text = b"" if content is None else content.read(100)
                if not text.strip().isdigit():
                    raise ConfigError(f"{shard}: {member.name} holds {text[:20]!r}: must be a class's number")
                labels[name] = int(text)
            end = tar.offset
        with shard.open("rb") as opened:
            opened.seek(end)
            if opened.read(512).strip(b"\0") or shard.stat().st_size < end + 512:
                raise ConfigError(
                    f"{shard} has {shard.stat().st_size} bytes, {count(len(images), 'image')} and no end mark of a "
                    f"tar: the "
                    f"shard is cut short; copy or pack it again"
                )
    except (tarfile.TarError, OSError) as error:
        raise ConfigError(f"{shard} cannot be read as an uncompressed tar: {error}; copy or pack it again") from None
    if odd := sorted(images.keys() ^ labels.keys()):
        has, lacks = ("an image", ".cls") if odd[0] in images else ("a .cls", f"image ({', '.join(SUFFIXES)})")
        raise ConfigError(f"{shard}: sample {odd[0].removeprefix('/')} has {has} and no {lacks}: it needs both")
    if not images:
        raise ConfigError(f"{shard} has 0 samples: a sample is key.jpg (or jpeg, png) and key.cls")
    return {
        "names": np.array([os.fsencode(member.name) for member in images.values()]),
        "offsets": np.array([member.offset_data for member in images.values()], dtype=np.int64),
        "sizes": np.array([member.size for member in images.values()], dtype=np.int64),
        "labels": np.array([labels[name] for name in images], dtype=np.int64),
    }


def decode(content: bytes, mode: str, size: int) -> Tensor:
    """uint8 [C, size, size]: the shorter side scaled to `size`, then the middle."""
    with warnings.catch_warnings(), Image.open(io.BytesIO(content)) as image:
        warnings.simplefilter("ignore")  # about metadata that is not used
        image.draft(mode, (size, size))  # a JPEG is decoded at the smallest scale that is large enough
        fitted = ImageOps.fit(in_8_bits(image).convert(mode), (size, size), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(fitted))
    return pixels[None] if mode == "L" else pixels.permute(2, 0, 1).contiguous()


def in_8_bits(image: Image.Image) -> Image.Image:
    """Pillow would cut off what is above 255."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode}, whose range is not known")
    return image


def skips(on_undecodable: str) -> bool:
    if on_undecodable not in ("skip", "stop"):
        raise ConfigError(f"data.{on_undecodable=} must be stop or skip")
    return on_undecodable == "skip"
