"""A checkpoint's files: written at a pace, with a checksum, and synced to the disk."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.serialization import get_crc32_options, set_crc32_options

from shardwise.devices import count_cpus

_PIECE = 2**24  # bytes. Large: a thread that asks for the interpreter's lock often gets nowhere beside a busy one


class Pace:
    """How many of a rank's threads write at a time: one beside the training, all where it waits for them.

    Several of a rank slow down a step that its host is busy to issue, and as much from another process: what they share
    is the machine, not the interpreter.
    """

    def __init__(self, beside_training: bool = False) -> None:
        self._turns = threading.Semaphore(1 if beside_training else io_threads())
        self._beside = beside_training

    def __enter__(self) -> None:
        self._turns.acquire()

    def __exit__(self, *args: object) -> None:
        self._turns.release()

    def hurry(self) -> None:
        if self._beside:
            self._beside = False
            self._turns.release(io_threads())


class SummedFile(io.FileIO):
    def __init__(self, path: str | os.PathLike[str], pace: Pace) -> None:
        super().__init__(path, "wb")
        self.pace, self.bytes, self.digest = pace, 0, hashlib.sha256()

    def write(self, content: Any) -> int:
        piece = memoryview(content)[:_PIECE]  # whoever writes through a buffer comes again with the rest
        with self.pace:
            many = super().write(piece)
            self.digest.update(piece[:many])
        self.bytes += many
        return many

    def close(self) -> None:
        try:
            if not self.closed:
                os.fsync(self.fileno())
        finally:
            super().close()


def io_threads() -> int:
    """Of a rank, to write, read and check files with, at most eight: a quarter of its share of the machine's CPUs.

    Two of these are often one core, and the training needs the rest.
    """
    share = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(8, share // 4, count_cpus() // 4))


def sha256_of(file: Path) -> str:
    digest, piece = hashlib.sha256(), memoryview(bytearray(min(_PIECE, file.stat().st_size + 1)))
    with file.open("rb", buffering=0) as content:
        while many := content.readinto(piece):
            digest.update(piece[:many])
    return digest.hexdigest()


def write_through(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def without_crc() -> Iterator[None]:
    """torch.save would compute a CRC-32 of everything, slower than to write it; the manifest has SHA-256."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
