"""Where each sample of a tar shard lies: read off the shard once, and kept."""

import os
import sys
import tarfile
import uuid
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recipes.image_classification.data.decoding import SUFFIXES
from shardwise.errors import ConfigError, count

INDEX_VERSION = 2

TarIndex = dict[str, npt.NDArray[Any]]  # names, offsets, sizes, labels: a sample each


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
