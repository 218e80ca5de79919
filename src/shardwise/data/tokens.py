"""Reads and writes token shards: a directory of raw little-endian tokens, and the index that describes them."""

import hashlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from shardwise.errors import DataError, count

INDEX = "index.json"
VERSION = 1
DTYPES: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

Tokens = npt.NDArray[Any]


class TokenShards:
    """One split of a shard directory, as one long sequence of tokens in mapped files.

    Raises:
        DataError: a shard cannot be opened, or has another size than the index says.
    """

    def __init__(self, directory: str | os.PathLike[str], split: str) -> None:
        self.directory = Path(directory)
        self.split = split
        index = _load_index(self.directory)
        if split not in index["splits"]:
            raise DataError(
                f"{self.directory} has no split {split!r}, only {sorted(index['splits'])}; name one of these"
            )
        self.shards: list[dict[str, Any]] = index["splits"][split]
        self.vocab_size: int = index["vocab_size"]
        self.description: str = index["source"]
        self.dtype = DTYPES[index["dtype"]]
        if not self.shards:
            raise DataError(f"split {split!r} of {self.directory} has 0 shards, it needs at least 1; prepare it again")
        self._arrays = [self._open(shard) for shard in self.shards]
        self._ends = np.cumsum([len(array) for array in self._arrays])

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
            raise _unreadable(path, error) from error


class TokenSequences:
    """Map-style dataset of windows: sample i predicts tokens [i*T + 1, (i+1)*T + 1) from tokens [i*T, (i+1)*T)."""

    def __init__(self, shards: TokenShards, sequence_length: int) -> None:
        if len(shards) <= sequence_length:
            raise DataError(
                f"split {shards.split!r} of {shards.directory} has {count(len(shards), 'token')}, one sequence needs "
                f"sequence_length + 1 = {sequence_length + 1}; use a sequence_length below {len(shards)} or more data"
            )
        self.shards = shards
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        """The number of whole sequences. The tokens after the last one are not used."""
        return (len(self.shards) - 1) // self.sequence_length

    def __getitem__(self, i: int) -> dict[str, npt.NDArray[np.int64]]:
        """`tokens` and `targets`, both int64 [sequence_length]."""
        if not 0 <= i < len(self):
            raise IndexError(f"sequence {i} is outside [0, {len(self)})")
        window = self.shards.tokens(i * self.sequence_length, self.sequence_length + 1).astype(np.int64)
        return {"tokens": window[:-1], "targets": window[1:]}


def write_token_shards(
    directory: str | os.PathLike[str],
    splits: Mapping[str, Iterable[Tokens]],
    *,
    vocab_size: int,
    shard_tokens: int = 1 << 27,
    description: str = "",
) -> Path:
    """Writes each split's arrays, end to end, as shards of at most `shard_tokens` tokens.

    The directory appears whole or not at all. If several processes write it, the first one wins, and the others discard
    their work.
    """
    directory = Path(directory)
    dtype = next((name for name, kind in DTYPES.items() if vocab_size <= 1 << 8 * kind.itemsize), None)
    if dtype is None or vocab_size < 1 or shard_tokens < 1:
        raise DataError(f"{vocab_size=} must be in [1, 2**32] and {shard_tokens=} at least 1; correct the value")
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        index = {
            "version": VERSION,
            "dtype": dtype,
            "vocab_size": vocab_size,
            "source": description,
            "splits": {
                split: _write_split(temporary, split, arrays, DTYPES[dtype], vocab_size, shard_tokens)
                for split, arrays in splits.items()
            },
        }
        with (temporary / INDEX).open("wb") as file:
            file.write(json.dumps(index, indent=2).encode())
            _flush(file)
        _flush_directory(temporary)
        _publish(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


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
        keys = chunk if order == 1 else chunk[:-1] * vocab_size + chunk[1:]
        counts += np.bincount(keys, minlength=len(counts))
    return counts


def _load_index(directory: Path) -> dict[str, Any]:
    path = directory / INDEX
    try:
        index = json.loads(path.read_bytes())
        version, dtype, splits = index["version"], index["dtype"], index["splits"]
        {"vocab_size": index["vocab_size"], "source": index["source"]}
        [(shard["file"], shard["tokens"], shard["sha256"]) for shards in splits.values() for shard in shards]
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a token shard index ({error!r}); prepare the directory again") from error
    if version != VERSION:
        raise DataError(f"{path} has version {version}, this code reads {VERSION}; prepare the directory again")
    if dtype not in DTYPES:
        raise DataError(
            f"{path} has dtype {dtype!r}, it must be one of {', '.join(DTYPES)}; prepare the directory again"
        )
    return dict(index)


def _unreadable(path: Path, error: OSError) -> DataError:
    remedy = "grant this user read permission" if isinstance(error, PermissionError) else "check the path or prepare it"
    return DataError(f"{path} must be a readable file: {error.strerror or error}; {remedy}")


def _write_split(
    directory: Path, split: str, arrays: Iterable[Tokens], dtype: np.dtype[Any], vocab_size: int, shard_tokens: int
) -> list[dict[str, Any]]:
    shards: list[dict[str, Any]] = []
    pieces = _pieces(split, arrays, vocab_size, shard_tokens)
    piece = next(pieces, None)
    while piece is not None:
        name, tokens, digest = f"{split}-{len(shards):05d}.bin", 0, hashlib.sha256()
        with (directory / name).open("wb") as file:
            while piece is not None and tokens < shard_tokens:
                raw = piece.astype(dtype).tobytes()
                file.write(raw)
                digest.update(raw)
                tokens += len(piece)
                piece = next(pieces, None)
            _flush(file)
        shards.append({"file": name, "tokens": tokens, "sha256": digest.hexdigest()})
    if not shards:
        raise DataError(f"split {split!r} for {directory.parent} has 0 tokens, it needs at least 1; check its source")
    return shards


def _pieces(split: str, arrays: Iterable[Tokens], vocab_size: int, shard_tokens: int) -> Iterator[Tokens]:
    """Cut the arrays at shard borders, and leave out empty ones."""
    filled = 0
    for array in arrays:
        if len(array) and not 0 <= int(array.min()) <= int(array.max()) < vocab_size:
            raise DataError(
                f"split {split!r} has tokens in [{array.min()}, {array.max()}], they must lie in [0, {vocab_size=}); "
                "raise vocab_size or correct the tokenizer"
            )
        while len(array):
            piece, array = array[: shard_tokens - filled], array[shard_tokens - filled :]
            filled = (filled + len(piece)) % shard_tokens
            yield piece


def _publish(temporary: Path, directory: Path) -> None:
    try:
        temporary.rename(directory)
    except OSError as error:
        if (directory / INDEX).is_file():
            return
        raise DataError(
            f"{directory} cannot be written ({error.strerror or error}): it must be absent, empty or hold a complete "
            f"{INDEX}; remove it or name another directory"
        ) from error
    _flush_directory(directory.parent)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
