"""Reads token shards, which shard_writer.py writes: shard_index.py says what lies in their folder."""

import hashlib
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.data.shard_content import content_digest
from shardwise.data.shard_index import DTYPES, ENDS_DTYPE, INDEX, TOKENIZER, Tokens, load_index, unreadable
from shardwise.data.shard_writer import write_token_shards
from shardwise.data.tokenizer import Tokenizer, digest, load_tokenizer
from shardwise.errors import BadSample, DataError, count

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
