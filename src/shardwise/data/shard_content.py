"""Tells by their bytes whether shards have changed: by all bytes of small data, by samples of large data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

WHOLE = 1_000_000_000  # bytes of all files together, up to which every byte is read
BLOCK = 1 << 16  # bytes of a sample
_BLOCKS = 16  # the most samples of a file, 1 MiB together
_ALL_BLOCKS = 1 << 14  # about as many samples of all files, 1 GiB together, however many files there are


def content_digest(paths: Sequence[Path]) -> str:
    """The SHA-256 of the sizes of the files and of their bytes, or of samples of these.

    Samples are the first and the last block of each file, and others evenly between them. Which they are depends on
    the sizes and the number of files alone.

    Raises:
        OSError: a file cannot be read.
    """
    sizes = [path.stat().st_size for path in paths]
    digest = hashlib.sha256(repr(sizes).encode())
    for path, size in zip(paths, sizes, strict=True):
        with path.open("rb") as file:
            for offset, length in blocks_of(size, sum(sizes), len(sizes)):
                file.seek(offset)
                digest.update(file.read(length))
    return digest.hexdigest()


def blocks_of(size: int, all_sizes: int, files: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of the bytes to read of a file with `size` bytes, which is one of `files`."""
    number = max(2, min(_BLOCKS, _ALL_BLOCKS // files))
    if all_sizes <= WHOLE or size <= number * BLOCK:
        yield from ((offset, min(1 << 24, size - offset)) for offset in range(0, size, 1 << 24))
        return
    for n in range(number):
        yield (size - BLOCK) * n // (number - 1), BLOCK
