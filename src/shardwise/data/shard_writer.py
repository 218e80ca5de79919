"""Writes token shards: the directory appears whole or not at all."""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardwise.data.shard_index import DTYPES, ENDS_DTYPE, INDEX, TOKENIZER, VERSION, Tokens, dtype_for
from shardwise.data.tokenizer import Tokenizer, digest
from shardwise.errors import DataError


def write_token_shards(
    directory: str | os.PathLike[str],
    splits: Mapping[str, Iterable[Tokens]],
    *,
    vocab_size: int,
    shard_tokens: int = 1 << 27,
    description: str = "",
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Writes each split's documents, end to end, as shards of at most `shard_tokens` tokens.

    Each array is a document, and ends with the token that says so. The directory appears whole or not at all. If
    several processes write it, the first one wins, and the others discard their work.

    Raises:
        DataError: a token is not below `vocab_size`, a split is empty, or the directory cannot be written.
    """
    directory = Path(directory)
    dtype = dtype_for(vocab_size)
    if shard_tokens < 1:
        raise DataError(f"{shard_tokens=} must be at least 1; correct the value")
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        written = {}
        for split, documents in splits.items():
            with SplitWriter(temporary, split, vocab_size, shard_tokens) as writer:
                for document in documents:
                    writer.add(document)
            written[split] = writer.shards
            if not written[split]:
                raise DataError(f"split {split!r} for {directory} has 0 tokens, it needs at least 1; check its source")
        index = {"version": VERSION, "dtype": dtype, "vocab_size": vocab_size, "source": description}
        write_index(temporary, index | {"splits": written}, tokenizer)
        publish(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


class SplitWriter:
    """Writes the shards of one split into a directory, document by document, and ends the last one at its exit."""

    def __init__(self, directory: Path, split: str, vocab_size: int, shard_tokens: int) -> None:
        self.directory, self.split, self.vocab_size, self.shard_tokens = directory, split, vocab_size, shard_tokens
        self.dtype = DTYPES[dtype_for(vocab_size)]
        self.shards: list[dict[str, Any]] = []  # as they stand in the index
        self._file: BinaryIO | None = None
        self._tokens, self._sha256 = 0, hashlib.sha256()  # of the shard that is being written
        self._ends: list[int] = []

    def add(self, document: Tokens) -> None:
        """Write a document, which goes on in the next shard where this one is full. An empty one is left out."""
        if not len(document):
            return
        if not 0 <= int(document.min()) <= int(document.max()) < self.vocab_size:
            raise DataError(
                f"split {self.split!r} has tokens in [{document.min()}, {document.max()}], they must lie in "
                f"[0, vocab_size={self.vocab_size}); raise vocab_size or correct the tokenizer"
            )
        while len(document):
            if self._tokens == self.shard_tokens:
                self._end_shard()
            room = self.shard_tokens - self._tokens
            self._write(document[:room])
            document = document[room:]
        self._ends.append(self._tokens)

    def __enter__(self) -> "SplitWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self._end_shard()
        elif self._file is not None:
            self._file.close()

    def _write(self, piece: Tokens) -> None:
        if self._file is None:
            self._file = (self.directory / f"{self._name()}.bin").open("wb")
        raw = piece.astype(self.dtype).tobytes()
        self._file.write(raw)
        self._sha256.update(raw)
        self._tokens += len(piece)

    def _end_shard(self) -> None:
        if self._file is None:
            return
        flush(self._file)
        self._file.close()
        name, ends = self._name(), np.array(self._ends, ENDS_DTYPE)
        with (self.directory / f"{name}.ends").open("wb") as file:
            file.write(ends.tobytes())
            flush(file)
        self.shards.append(
            {
                "file": f"{name}.bin",
                "tokens": self._tokens,
                "sha256": self._sha256.hexdigest(),
                "ends": f"{name}.ends",
                "documents": len(ends),
            }
        )
        self._file, self._tokens, self._ends, self._sha256 = None, 0, [], hashlib.sha256()

    def _name(self) -> str:
        return f"{self.split}-{len(self.shards):05d}"


def write_index(directory: Path, index: dict[str, Any], tokenizer: Tokenizer | None) -> None:
    """Write the index, and before it the tokenizer's files, so that a directory with an index is complete."""
    described = None
    if tokenizer is not None:
        (directory / TOKENIZER).mkdir(exist_ok=True)
        for name, content in tokenizer.files().items():
            with (directory / TOKENIZER / name).open("wb") as file:
                file.write(content.encode())
                flush(file)
        flush_directory(directory / TOKENIZER)
        described = {"name": tokenizer.name, "sha256": digest(tokenizer)}
    with (directory / INDEX).open("wb") as file:
        file.write(json.dumps(index | {"tokenizer": described}, indent=2).encode())
        flush(file)
    flush_directory(directory)


def publish(temporary: Path, directory: Path) -> None:
    """Give a complete directory its name. If another process was first, its directory stays."""
    try:
        temporary.rename(directory)
    except OSError as error:
        if (directory / INDEX).is_file():
            return
        raise DataError(
            f"{directory} cannot be written ({error.strerror or error}): it must be absent, empty or hold a complete "
            f"{INDEX}; remove it or name another directory"
        ) from error
    flush_directory(directory.parent)


def flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
