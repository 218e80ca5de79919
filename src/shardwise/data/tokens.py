"""Reads and writes token shards, and says what counting alone reaches on them."""

import hashlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from shardwise.data.shard_index import (
    DTYPES,
    ENDS_DTYPE,
    INDEX,
    TOKENIZER,
    VERSION,
    Tokens,
    content_digest,
    dtype_for,
    load_index,
    unreadable,
)
from shardwise.data.tokenizer import Tokenizer, digest, load_tokenizer
from shardwise.errors import BadSample, DataError, count
from shardwise.run_dir.files import sync, sync_all

# Reads token shards: shard_index.py says what lies in their folder.

__all__ = ["INDEX", "TokenSequences", "TokenShards", "Tokens", "tokenizer_of", "write_token_shards"]

_ENDS_READ = 1 << 22  # ends of documents in a shard, up to which all of them are checked when it is opened


class TokenShards:
    """One split of a shard directory, as one long sequence of tokens in mapped files.

    Raises:
        DataError: a shard cannot be opened, has another size than the index says, or ends of documents that cannot be.
    """

    def __init__(self, directory: str | os.PathLike[str], split: str) -> None:
        self.directory = Path(directory)
        self.split = split
        index = load_index(self.directory)
        if split not in index["splits"]:
            raise DataError(
                f"{self.directory} has no split {split!r}, only {sorted(index['splits'])}; name one of these"
            )
        self.shards: list[dict[str, Any]] = index["splits"][split]
        self.vocab_size: int = index["vocab_size"]
        self.description: str = index["source"]
        self.fingerprint: str | None = index.get("fingerprint")
        self.dtype = DTYPES[index["dtype"]]
        if not self.shards:
            raise DataError(f"split {split!r} of {self.directory} has 0 shards, it needs at least 1; prepare it again")
        self._arrays = [self._open(shard) for shard in self.shards]
        self._ends = np.cumsum([len(array) for array in self._arrays])
        self.knows_documents = index["version"] > 1
        self._document_ends: list[Tokens] = []
        if self.knows_documents:
            self._document_ends = [self._open_ends(shard) for shard in self.shards]

    def __len__(self) -> int:
        """The number of tokens in the split."""
        return int(self._ends[-1])

    def __reduce__(self) -> tuple[type["TokenShards"], tuple[Path, str]]:
        # A pickled memmap would copy the data, so a spawned loader worker maps the files itself.
        return TokenShards, (self.directory, self.split)

    def tokens(self, start: int, count: int) -> Tokens:
        """The tokens [start, start + count) in the shards' dtype, also across shards."""
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(
                f"tokens [{start}, {start + count}) are outside split {self.split!r} of {len(self)} tokens"
            )
        pieces = []
        shard = int(np.searchsorted(self._ends, start, side="right"))
        while count > 0:
            array = self._arrays[shard]
            offset = start - (int(self._ends[shard]) - len(array))
            pieces.append(array[offset : offset + count])
            start, count, shard = start + len(pieces[-1]), count - len(pieces[-1]), shard + 1
        return np.concatenate(pieces) if pieces else np.empty(0, self.dtype)

    @property
    def digest(self) -> str:
        """The SHA-256 of the digests in the index, which does not depend on where the shards lie."""
        return hashlib.sha256("".join(shard["sha256"] for shard in self.shards).encode()).hexdigest()

    @cached_property
    def content_digest(self) -> str:
        """The SHA-256 of what lies in the files: of all bytes up to 1 GB, of samples of each file above that.

        Raises:
            DataError: a file cannot be read.
        """
        names = [shard[key] for shard in self.shards for key in ("file", "ends") if key in shard]
        try:
            return content_digest([self.directory / name for name in names])
        except OSError as error:
            raise unreadable(Path(error.filename or self.directory), error) from error

    @property
    def documents(self) -> int:
        """The number of documents that end in the split."""
        return sum(map(len, self._document_ends))

    def document_ends(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """The ends e of documents with start < e <= start + count, ascending, int64. Token e is the next document's.

        Raises:
            DataError: the shards are of version 1, which does not know them.
        """
        if not self.knows_documents:
            raise DataError(f"{self.directory} does not say where documents end: prepare it again")
        found, end = [], start + count
        shard = int(np.searchsorted(self._ends, start, side="right"))
        while shard < len(self._arrays) and (begin := int(self._ends[shard]) - len(self._arrays[shard])) < end:
            ends = self._document_ends[shard]
            first, last = (np.searchsorted(ends, np.uint64(max(0, at - begin)), "right") for at in (start, end))
            found.append(ends[first:last].astype(np.int64) + begin)
            shard += 1
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def verify(self) -> None:
        """Reads every shard and raises `DataError` for the first whose SHA-256 is not the index's."""
        for shard, array in zip(self.shards, self._arrays, strict=True):
            digest = hashlib.sha256(array.data).hexdigest()
            if digest != shard["sha256"]:
                raise DataError(
                    f"{self.directory / shard['file']} has sha256 {digest[:12]}…, {INDEX} says {shard['sha256'][:12]}…"
                    "; the shard changed after it was written: copy or prepare it again"
                )

    def _open(self, shard: Mapping[str, Any]) -> Tokens:
        path, expected = self.directory / shard["file"], shard["tokens"] * self.dtype.itemsize
        try:
            size = path.stat().st_size
            if size != expected:
                raise DataError(
                    f"{path} has {size} bytes, {INDEX} says {shard['tokens']} tokens * {self.dtype.itemsize} = "
                    f"{expected}; the copy is incomplete: copy or prepare it again"
                )
            if size == 0:
                raise DataError(
                    f"{path} has 0 tokens, a shard needs at least 1; remove it from {INDEX} or prepare it again"
                )
            array: Tokens = np.memmap(path, dtype=self.dtype, mode="r")
            return array
        except OSError as error:
            raise unreadable(path, error) from error

    def _open_ends(self, shard: Mapping[str, Any]) -> Tokens:
        path, documents = self.directory / shard["ends"], shard["documents"]
        try:
            if path.stat().st_size != documents * ENDS_DTYPE.itemsize:
                raise DataError(
                    f"{path} has {path.stat().st_size} bytes, {INDEX} says {documents} documents * "
                    f"{ENDS_DTYPE.itemsize}; the copy is incomplete: copy or prepare it again"
                )
            # An empty file cannot be mapped.
            ends = np.memmap(path, dtype=ENDS_DTYPE, mode="r") if documents else np.empty(0, ENDS_DTYPE)
            _check_ends(path, ends, shard["tokens"])
            return ends
        except OSError as error:
            raise unreadable(path, error) from error


def _check_ends(path: Path, ends: Tokens, tokens: int) -> None:
    """Refuse ends of documents that do not rise, or lie outside the shard. Of many the first and the last are read."""
    for part in [ends] if len(ends) <= _ENDS_READ else [ends[: _ENDS_READ // 2], ends[-_ENDS_READ // 2 :]]:
        if len(part) and (part[0] < 1 or part[-1] > tokens or not (part[1:] > part[:-1]).all()):
            raise DataError(
                f"{path} holds ends of documents that do not rise from 1 to at most {tokens:,}, the tokens of the "
                f"shard; the file changed after it was written: copy or prepare it again"
            )


def tokenizer_of(directory: str | os.PathLike[str]) -> Tokenizer | None:
    """The tokenizer that made the shards; None if they do not say.

    Raises:
        DataError: its files are not those that the shards were made with.
    """
    if (described := load_index(Path(directory)).get("tokenizer")) is None:
        return None
    found = load_tokenizer(Path(directory) / TOKENIZER)
    if digest(found) != described["sha256"]:
        raise DataError(f"{Path(directory) / TOKENIZER} has changed since the shards were made; prepare them again")
    return found


class TokenSequences:
    """Map-style dataset of windows: sample i predicts tokens [i*T + 1, (i+1)*T + 1) from tokens [i*T, (i+1)*T)."""

    def __init__(self, shards: TokenShards, sequence_length: int) -> None:
        if len(shards) <= sequence_length:
            raise DataError(
                f"split {shards.split!r} of {shards.directory} has {count(len(shards), 'token')}, one sequence needs "
                f"sequence_length + 1 = {sequence_length + 1}; use data.sequence_length below {len(shards)}, or "
                f"more data"
            )
        self.shards = shards
        self.sequence_length = sequence_length
        self._may_be_too_large = int(np.iinfo(shards.dtype).max) >= shards.vocab_size  # never so for bytes

    def __len__(self) -> int:
        """The number of whole sequences. The tokens after the last one are not used."""
        return (len(self.shards) - 1) // self.sequence_length

    def identity_of_data(self) -> dict[str, str]:
        """Digests of the index and of the files, by which a resumed run knows whether they have changed."""
        digests = f"sha256 {self.shards.digest[:16]}; content {self.shards.content_digest[:16]}"
        return {f"split {self.shards.split}": digests}

    def __getitem__(self, i: int) -> dict[str, npt.NDArray[np.int64]]:
        """`tokens` and `targets`, both int64 [sequence_length].

        Raises:
            BadSample: a token is not in the vocabulary of the index. A GPU would not say which it was.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"sequence {i} is outside [0, {len(self)})")
        window = self.shards.tokens(i * self.sequence_length, self.sequence_length + 1)
        if self._may_be_too_large and (largest := int(window.max())) >= self.shards.vocab_size:
            raise BadSample(
                f"{self.shards.directory} holds the token {largest} in sample {i} of split {self.shards.split!r}, and "
                f"its {INDEX} has vocab_size {self.shards.vocab_size}: every token must be below that; prepare "
                f"it again, or correct its vocab_size"
            )
        window = window.astype(np.int64)
        return {"tokens": window[:-1], "targets": window[1:]}


# Writes token shards: the directory appears whole or not at all.


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


# What counting alone reaches on a validation split: a model must be better.


def unigram_bigram_baselines(train: TokenShards, validation: TokenShards, vocab_size: int) -> dict[str, float]:
    """The losses, in nats per token, that counting alone reaches on `validation`. A model must be better.

    Fitted on at most the first 20M tokens of `train`, measured on at most the first 2M of `validation`. `unigram`:
    p(b) = (n(b) + 1) / (n + V). `bigram`, for V <= 1024 only (its table has V² entries), interpolates by Witten-Bell:
    p(b|a) = (n(ab) + d(a) p(b)) / (n(a) + d(a)), d(a) = max(1, distinct followers of a). Both predict the same tokens.
    """
    counts = _count(train, 20_000_000, vocab_size, order=1)
    unigram = (counts + 1) / (counts.sum() + vocab_size)
    measured = _count(validation, 2_000_000, vocab_size, order=1)
    measured[int(validation.tokens(0, 1)[0])] -= 1  # no model predicts the first token
    baselines = {"unigram": _cross_entropy(measured, unigram)}
    if vocab_size <= 1024:
        pairs = _count(train, 20_000_000, vocab_size, order=2).reshape(vocab_size, vocab_size)
        followers = np.maximum((pairs > 0).sum(axis=1, keepdims=True), 1)
        bigram = (pairs + followers * unigram) / (pairs.sum(axis=1, keepdims=True) + followers)
        baselines["bigram"] = _cross_entropy(_count(validation, 2_000_000, vocab_size, order=2), bigram.ravel())
    return baselines


def _cross_entropy(counts: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> float:
    total = int(counts.sum())
    return float(-(counts @ np.log(probabilities)) / total) if total else math.nan


def _count(shards: TokenShards, limit: int, vocab_size: int, order: int) -> npt.NDArray[np.int64]:
    """Count each token (order 1, [V]) or each pair of neighbours (order 2, [V * V])."""
    counts = np.zeros(vocab_size**order, np.int64)
    limit, step = min(limit, len(shards)), 1 << 20
    for start in range(0, limit - order + 1, step):
        chunk = shards.tokens(start, min(step + order - 1, limit - start)).astype(np.int64)
        if (largest := int(chunk.max())) >= vocab_size:
            raise DataError(
                f"{shards.directory} holds the token {largest}, and its index has vocab_size {vocab_size}: every token "
                f"must be below that; prepare the directory again"
            )
        keys = chunk if order == 1 else chunk[:-1] * vocab_size + chunk[1:]
        counts += np.bincount(keys, minlength=len(counts))
    return counts
