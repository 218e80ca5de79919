"""The index of a folder of token shards: what its files are, of which numbers, and who made them.

Beside the tokens of a shard, `train-00000.bin`, lie the ends of its documents, `train-00000.ends`: 64-bit positions in
the shard, each that of the token after a document's last. A document may go on in the next shard. The folder
`tokenizer` holds the files of the tokenizer that made the tokens, where it is known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.errors import DataError
from shardwise.run_dir.files import inside, read_json

INDEX = "index.json"
TOKENIZER = "tokenizer"  # the folder of its files
VERSION = 2
READABLE = (1, VERSION)  # version 1 does not know where documents end, nor their tokenizer
DTYPES: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
ENDS_DTYPE = np.dtype("<u8")

Tokens = npt.NDArray[Any]


def dtype_for(vocab_size: int) -> str:
    """The smallest of `DTYPES` that holds every token.

    Raises:
        DataError: none does.
    """
    found = next((name for name, kind in DTYPES.items() if vocab_size <= 1 << 8 * kind.itemsize), None)
    if found is None or vocab_size < 1:
        raise DataError(f"{vocab_size=} must be in [1, 2**32]; correct the value")
    return found


def load_index(directory: Path) -> dict[str, Any]:
    path = directory / INDEX
    try:
        index = read_json(path)
        version, dtype, splits, size = (index[key] for key in ("version", "dtype", "splits", "vocab_size"))
        {"source": index["source"]}
        all_shards = [shard for shards in splits.values() for shard in shards]
        [(inside(directory, shard["file"]), shard["tokens"] + 0, shard["sha256"]) for shard in all_shards]
        [(inside(directory, shard["ends"]), shard["documents"]) for shard in all_shards if version in READABLE[1:]]
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a token shard index ({error!r}); prepare the directory again") from error
    if version not in READABLE:
        raise DataError(
            f"{path} has version {version}, this code reads {VERSION} and older; prepare the directory again"
        )
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DataError(
            f"{path} has dtype {dtype!r}, it must be one of {', '.join(DTYPES)}; prepare the directory again"
        )
    if type(size) is not int or not 1 <= size <= 2**32:
        raise DataError(
            f"{path} has vocab_size {size!r}, it must be a whole number in [1, 2**32]; prepare the directory again"
        )
    return dict(index)


def unreadable(path: Path, error: OSError) -> DataError:
    denied = isinstance(error, PermissionError)
    remedy = "grant this user read permission" if denied else "check the path, or make it with shardwise prepare"
    return DataError(f"{path} must be a readable file: {error.strerror or error}; {remedy}")


# Tells by their bytes whether shards have changed: by all bytes of small data, by samples of large data.

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
