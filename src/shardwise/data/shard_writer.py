"""Writes token shards: the directory appears whole or not at all."""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from shardwise.data.shard_index import DTYPES, ENDS_DTYPE, INDEX, TOKENIZER, VERSION, Tokens, dtype_for
from shardwise.data.tokenizer import Tokenizer, digest
from shardwise.errors import DataError
from shardwise.run_dir.files import sync, sync_all


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
    """Writes the shards of one split into a directory, and ends the last one at its exit.

    What `state` returned at one time, `restore` of another writer takes up again: whatever was written since is gone.
    """

    def __init__(self, directory: Path, split: str, vocab_size: int, shard_tokens: int) -> None:
        self.directory, self.split, self.vocab_size, self.shard_tokens = directory, split, vocab_size, shard_tokens
        self.dtype = DTYPES[dtype_for(vocab_size)]
        self.shards: list[dict[str, Any]] = []  # as they stand in the index
        self._files: tuple[BinaryIO, BinaryIO] | None = None  # tokens and ends of the shard that is being written
        self._tokens, self._documents, self._sha256 = 0, 0, hashlib.sha256()  # of that shard

    def add(self, document: Tokens) -> None:
        """Write a document, which goes on in the next shard where this one is full. An empty one is left out."""
        self.add_all(document, np.array([len(document)]))

    def add_all(self, tokens: Tokens, lengths: npt.NDArray[Any]) -> None:
        """Write documents whose tokens stand end to end. `lengths`: the number of tokens of each."""
        if not len(tokens):
            return
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise DataError(
                f"split {self.split!r} has tokens in [{tokens.min()}, {tokens.max()}], they must lie in "
                f"[0, vocab_size={self.vocab_size}); raise vocab_size or correct the tokenizer"
            )
        ends, begin = np.cumsum(lengths[lengths > 0]), 0
        while begin < len(tokens):
            if self._tokens == self.shard_tokens:
                self._end_shard()
            stop = min(len(tokens), begin + self.shard_tokens - self._tokens)
            first, last = np.searchsorted(ends, [begin, stop], side="right")
            self._write(tokens[begin:stop], ends[first:last] - begin + self._tokens)
            begin = stop

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON holds it. All of it is on the disk when this returns."""
        for file in self._files or ():
            flush(file)
        return {"shards": list(self.shards), "tokens": self._tokens, "documents": self._documents}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`. Files that were written later are cut or removed.

        Raises:
            OSError: a file is missing or shorter than it was.
        """
        self.shards = list(state["shards"])
        known = {shard[key] for shard in self.shards for key in ("file", "ends")}
        for path in self.directory.glob(f"{self.split}-*"):
            if path.name not in known and not (state["tokens"] and path.stem == self._name()):
                path.unlink()
        if not state["tokens"]:
            return
        self._tokens, self._documents = state["tokens"], state["documents"]
        self._files = self._open("r+b")
        for file, size in zip(self._files, self._sizes(), strict=True):
            if file.seek(0, os.SEEK_END) < size:
                raise OSError(f"{file.name} has fewer than {size} bytes")
            file.truncate(size)
        self._files[0].seek(0)
        while piece := self._files[0].read(1 << 24):
            self._sha256.update(piece)
        self._files[1].seek(0, os.SEEK_END)

    def __enter__(self) -> "SplitWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self._end_shard()
        for file in self._files or ():
            with suppress(OSError):  # what is left to be written would be cut off anyway
                file.close()

    def _open(self, mode: str) -> tuple[BinaryIO, BinaryIO]:
        paths = (self.directory / f"{self._name()}.{kind}" for kind in ("bin", "ends"))
        tokens, ends = (path.open(mode) for path in paths)
        return cast(BinaryIO, tokens), cast(BinaryIO, ends)

    def _sizes(self) -> tuple[int, int]:
        return self._tokens * self.dtype.itemsize, self._documents * ENDS_DTYPE.itemsize

    def _write(self, piece: Tokens, ends: npt.NDArray[Any]) -> None:
        if self._files is None:
            self._files = self._open("wb")
        raw = piece.astype(self.dtype).tobytes()
        self._files[0].write(raw)
        self._files[1].write(ends.astype(ENDS_DTYPE).tobytes())
        self._sha256.update(raw)
        self._tokens, self._documents = self._tokens + len(piece), self._documents + len(ends)

    def _end_shard(self) -> None:
        if self._files is None:
            return
        for file in self._files:
            flush(file)
            file.close()
        name = self._name()
        self.shards.append(
            {
                "file": f"{name}.bin",
                "tokens": self._tokens,
                "sha256": self._sha256.hexdigest(),
                "ends": f"{name}.ends",
                "documents": self._documents,
            }
        )
        self._files, self._tokens, self._documents, self._sha256 = None, 0, 0, hashlib.sha256()

    def _name(self) -> str:
        return f"{self.split}-{len(self.shards):05d}"


def write_index(directory: Path, index: dict[str, Any], tokenizer: Tokenizer | None) -> None:
    """Write the index, and before it the tokenizer's files, so that a directory with an index is complete."""
    described = None
    if tokenizer is not None:
        (directory / TOKENIZER).mkdir(exist_ok=True)
        for name, content in tokenizer.files().items():
            (directory / TOKENIZER / name).write_text(content, encoding="utf-8")
        described = {"name": tokenizer.name, "sha256": digest(tokenizer)}
    (directory / INDEX).write_text(json.dumps(index | {"tokenizer": described}, indent=2), encoding="utf-8")


def publish(temporary: Path, directory: Path) -> None:
    """Give a complete directory its name. If another process was first, its directory stays."""
    sync_all(temporary)
    try:
        temporary.rename(directory)
    except OSError as error:
        if (directory / INDEX).is_file():
            return
        raise DataError(
            f"{directory} cannot be written ({error.strerror or error}): it must be absent, empty or hold a complete "
            f"{INDEX}; remove it or name another directory"
        ) from error
    sync(directory.parent)


def flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
