"""Writes and checks a checkpoint's files: at a pace that leaves the training room, with a checksum, synced to disk."""

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
from shardwise.run_dir.reading import open_regular

# Bytes that are written at a time. It is large, since beside a busy thread another waits long for the interpreter's
# lock, each time that it asks for it.
_PIECE = 2**24


class Pace:
    """Limits how many of a rank's threads write at a time: one beside the training, all when the training waits.

    Several threads slow down a step whose host is the bottleneck. Threads of another process do so just as much: they
    compete for the machine, not for the interpreter.
    """

    def __init__(self, beside_training: bool = False) -> None:
        self._turns = threading.Semaphore(1 if beside_training else io_threads())
        self._beside = beside_training

    def __enter__(self) -> None:
        self._turns.acquire()

    def __exit__(self, *args: object) -> None:
        self._turns.release()

    def hurry(self) -> None:
        """Let all threads write: the training waits from here on."""
        if self._beside:
            self._beside = False
            self._turns.release(io_threads())


class SummedFile(io.FileIO):
    """A file that computes its size and SHA-256 while it is written."""

    def __init__(self, path: str | os.PathLike[str], pace: Pace) -> None:
        super().__init__(path, "wb")
        self.pace, self.bytes, self.digest = pace, 0, hashlib.sha256()

    def write(self, content: Any) -> int:
        piece = memoryview(content)[:_PIECE]  # a buffered writer writes the rest in further calls
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
    """The number of threads with which a rank writes, reads and checks files: from one to eight.

    It is a quarter of the rank's share of the machine's CPUs: two CPUs are often one core, and the training needs the
    rest.
    """
    share = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(8, share // 4, count_cpus() // 4))


def sha256_of(file: Path) -> str:
    digest, piece = hashlib.sha256(), memoryview(bytearray(min(_PIECE, file.stat().st_size + 1)))
    with open_regular(file) as content:
        while many := content.readinto(piece):
            digest.update(piece[:many])
    return digest.hexdigest()


def write_through(path: Path, content: bytes) -> None:
    """Write a file and sync it to disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def without_crc() -> Iterator[None]:
    """Keep torch.save from computing a CRC-32, which takes longer than writing; the manifest has a SHA-256."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
