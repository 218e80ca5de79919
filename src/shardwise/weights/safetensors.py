"""Reads headers of safetensors files, and writes such files: a header in JSON, then the bytes of the tensors.

This needs neither torch nor the package safetensors: the launcher checks the weights that a run starts from, and an
export never holds more than one tensor in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.run_dir.files import MANIFEST, open_regular, parse_json, read_json

INDEX = "model.safetensors.index.json"

# torch's names of dtypes → the format's
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
          "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"}  # fmt: skip

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class Stored:
    """A tensor that is in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # the format's name of it


@dataclass(frozen=True)
class Entry:
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name of it
    itemsize: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def list_weights(path: Path, option: str) -> dict[str, Stored]:
    """List the tensors of a file, or of a folder of files, by name. Reads headers only.

    `option`: the option that names the path, for messages, e.g. `init_from=weights`.

    Raises:
        ConfigError: no such path, no safetensors, pickles, or a file that is cut short; the message says which.
    """
    try:
        stored: dict[str, Stored] = {}
        for file in _files(path, option):
            for name, entry in _header(file, option).items():
                if name in stored:
                    raise ConfigError(
                        f"{option}: {stored[name].file.name} and {file.name} both have {name}; name one of them, or "
                        f"leave one folder to one model"
                    )
                stored[name] = Stored(file, tuple(entry["shape"]), entry["dtype"])
        return stored
    except OSError as error:
        raise ConfigError(f"{option} cannot be read: {error.strerror} ({error.filename}); give another path") from None


def _files(path: Path, option: str) -> list[Path]:
    if not path.exists():
        raise ConfigError(f"{option}: there is no such file or folder; give one with safetensors")
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ConfigError(f"{option} is no .safetensors file" + _remedy([path]))
        return [path]
    if (path / INDEX).is_file():
        return _indexed(path / INDEX, option)
    if found := sorted(path.glob("*.safetensors")):
        return found
    raise ConfigError(f"{option}: no *.safetensors in that folder" + _remedy(sorted(path.iterdir())))


def _remedy(files: list[Path]) -> str:
    if pickled := [file.name for file in files if _is_pickled(file)]:
        return (
            f": {pickled[0]} is a pickle, which may run any code when it is read; write its tensors with "
            f"safetensors.torch.save_file first"
        )
    return "; give one, or a folder of them"


def _is_pickled(file: Path) -> bool:
    if file.suffix not in _PICKLED or not file.is_file():
        return False
    with file.open("rb") as content:
        return content.read(2) in (b"PK", b"\x80\x02")  # torch's zip archive; before torch 1.6 a plain pickle


def _indexed(index: Path, option: str) -> list[Path]:
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        files = [index.with_name(Path(name).name) for name in names]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(f"{option}: {index.name} is no index of safetensors; copy it again") from None
    if missing := [file.name for file in files if not file.is_file()]:
        raise ConfigError(
            f"{option}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} in {index.name} and not in the "
            f"folder; copy the whole folder"
        )
    return files


def _header(file: Path, option: str) -> dict[str, dict[str, Any]]:
    size = file.stat().st_size
    try:
        with open_regular(file) as content:
            length = int.from_bytes(content.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ValueError
            header: dict[str, dict[str, Any]] = parse_json(content.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if not all(isinstance(entry["dtype"], str) and isinstance(entry["shape"], list) for entry in header.values()):
            raise ValueError
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(f"{option}: {file.name} is damaged, or no safetensors; copy it again") from None
    if end != size:
        raise ConfigError(f"{option}: {file.name} has {size} bytes, and its header says {end}; copy it again")
    return header


def shards(entries: list[Entry], limit: float) -> Iterator[list[Entry]]:
    """Cut `entries` into lists of at most `limit` bytes, in their order. A larger entry is alone in its list."""
    shard: list[Entry] = []
    for entry in entries:
        if shard and sum(e.bytes for e in shard) + entry.bytes > limit:
            yield shard
            shard = []
        shard.append(entry)
    if shard:
        yield shard


def write_weights(folder: Path, entries: list[Entry], limit: float, read: Callable[[Entry], Any]) -> None:
    """Write `model.safetensors`, or several files with an index if it has more than `limit` bytes.

    `read` gives the bytes of a tensor; one tensor is held in memory at a time.

    Raises:
        OSError
    """
    cut = list(shards(entries, limit))
    names = ["model.safetensors"]
    if len(cut) > 1:
        names = [f"model-{number:05d}-of-{len(cut):05d}.safetensors" for number in range(1, len(cut) + 1)]
        weight_map = {entry.name: name for name, shard in zip(names, cut, strict=True) for entry in shard}
        index = {"metadata": {"total_size": sum(e.bytes for e in entries)}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    for name, shard in zip(names, cut, strict=True):
        _write_file(folder / name, sorted(shard, key=lambda entry: -entry.itemsize), read)  # aligns each tensor


def _write_file(path: Path, entries: list[Entry], read: Callable[[Entry], Any]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    end = 0
    for entry in entries:
        start, end = end, end + entry.bytes
        header[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            file.write(read(entry))


def check_weights(plan: Plan) -> None:
    """Check that the files of `init_from=` can be read, if the run starts from them."""
    from importlib.util import find_spec

    if plan.init_from is None or plan.resume is not None or (Path(plan.init_from) / MANIFEST).is_file():
        return
    if find_spec("safetensors") is None:
        raise ConfigError("init_from needs safetensors, which is not installed: pip install -r requirements.txt")
    list_weights(Path(plan.init_from), f"init_from={plan.init_from}")
