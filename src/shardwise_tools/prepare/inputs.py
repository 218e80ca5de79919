"""The options of `shardwise prepare`, and its inputs: paths, patterns and folders become one list of a fixed order."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from shardwise.config.schema import MISSING
from shardwise.data.shard_index import INDEX, dtype_for
from shardwise.devices import count_cpus
from shardwise.errors import ConfigError, count

TRAIN = "train"  # the tokenizer that is trained on the inputs
SMALLEST_VOCABULARY = 257  # of such a tokenizer: the bytes, and the token that ends a document
_FITTING = ((10**6, 1024), (10**7, 2048), (10**8, 8192), (10**9, 16_384))  # below so many bytes → tokens
LARGEST_VOCABULARY = 4_194_304  # the trainer reserves memory for all of it, and aborts the process if there is none


class OnError(Enum):
    stop = "stop"
    skip = "skip"


def fitting_vocabulary(size: int) -> int:
    """The size of a trained tokenizer's vocabulary for `size` bytes of text, if none is given.

    A model of a small text sees each token often enough to learn it only if there are few.
    """
    return next((tokens for limit, tokens in _FITTING if size < limit), 32_768)


@dataclass
class PrepareConfig:
    """The words of the command. `input` has the paths, patterns and folders as they were given."""

    output: str = MISSING
    tokenizer: str = TRAIN
    vocab_size: int | None = None
    field: str = "text"
    validation: float = 0.01
    end_of_document: str | None = None
    processes: int | None = None
    shard_tokens: int = 1 << 27
    on_error: OnError = OnError.stop
    pad_vocabulary_to: int | None = None
    cut_texts: int | None = None

    @property
    def is_trained(self) -> bool:
        """Whether the tokenizer is made from the inputs."""
        return self.tokenizer == TRAIN

    def count_processes(self) -> int:
        return self.processes or count_cpus()

    def check(self) -> None:
        """Raises `ConfigError` for values that cannot work, whatever the inputs are."""
        for name, least in (("processes", 1), ("shard_tokens", 1), ("pad_vocabulary_to", 1), ("cut_texts", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"{name}={value}: must be at least {least}")
        if not 0 <= self.validation < 1:
            raise ConfigError(
                f"validation={self.validation}: must be at least 0 and below 1, the share of documents that is held out"
            )
        if not self.output:
            raise ConfigError("output is empty: name the folder that is to be made")
        if Path(self.output).name in ("", ".."):
            raise ConfigError(f"output={self.output}: name a folder that is to be made, such as output=data/books")
        if self.pad_vocabulary_to is not None:
            dtype_for(self.pad_vocabulary_to)
        self._check_trained()

    def _check_trained(self) -> None:
        if not self.is_trained:
            if self.vocab_size is not None:
                raise ConfigError(
                    f"vocab_size={self.vocab_size} belongs to tokenizer=train, and tokenizer={self.tokenizer} has its "
                    f"own: leave it out, or give tokenizer=train"
                )
            return
        if self.vocab_size is None:  # it follows from the size of the inputs
            pass
        elif self.vocab_size < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"vocab_size={self.vocab_size}: must be at least {SMALLEST_VOCABULARY}, which are the 256 bytes and "
                f"the token that ends a document; 8192 suits a small model"
            )
        elif self.vocab_size > LARGEST_VOCABULARY:
            raise ConfigError(
                f"vocab_size={self.vocab_size}: must be at most {LARGEST_VOCABULARY}; 8192 suits a small model"
            )
        if self.end_of_document is not None:
            raise ConfigError("tokenizer=train names the token that ends a document itself: leave end_of_document out")


KINDS = {".txt": "text", ".md": "text", ".jsonl": "lines", ".json": "lines", ".ndjson": "lines", ".parquet": "rows"}
PACKED = (".gz", ".zst")
ENDINGS = ".txt, .md, .jsonl, .json, .ndjson (also with .gz or .zst behind), .parquet"


@dataclass(frozen=True)
class InputFile:
    """One file. `kind` is "text" (one document), "lines" (a JSON object a line) or "rows" (Parquet)."""

    path: str
    kind: str
    packed: str  # ".gz", ".zst", or nothing
    size: int  # bytes on the disk
    changed: int  # when, in nanoseconds


def find_inputs(given: list[str]) -> tuple[list[InputFile], list[str]]:
    """The files that `given` means, and those in its folders that are left out because of their ending.

    The order is that of `given`; what a pattern or a folder means is sorted by name.

    Raises:
        ConfigError: nothing is found, a file is named twice, has an unknown ending or cannot be looked at.
    """
    if not given:
        raise ConfigError("there is no input: name files, folders or patterns, such as input=books/*.jsonl")
    files: dict[str, InputFile] = {}
    left_out: list[str] = []
    for word in given:
        for path in _paths(word):
            if kind_of(path) is None:
                left_out.append(path)
                continue
            found = _look_at(path)
            same = os.path.realpath(path)
            if same in files:
                raise ConfigError(f"{path} is named twice among the inputs, as {files[same].path} too: name it once")
            files[same] = found
    if not files:
        raise ConfigError(
            f"input={','.join(given)}: no file there has one of the endings {ENDINGS}"
            + (f" ({count(len(left_out), 'other file')}, such as {left_out[0]})" if left_out else "")
        )
    return list(files.values()), left_out


def split_words(word: str) -> list[str]:
    """`a.txt,b.txt` → both, unless there is a file of the whole name."""
    return [word] if os.path.lexists(word) else [part for part in word.split(",") if part]


def kind_of(path: str) -> tuple[str, str] | None:
    """(kind, packing) by the ending of a file's name; None: it is not one of ours."""
    stem, packed = path, ""
    if path.lower().endswith(PACKED):
        stem, packed = os.path.splitext(path)
    kind = KINDS.get(os.path.splitext(stem)[1].lower())
    return None if kind is None or (packed and kind == "rows") else (kind, packed.lower())


def _paths(word: str) -> Iterator[str]:
    path = os.path.normpath(os.path.expanduser(word))
    if os.path.isdir(path):
        yield from _below(path)
    elif os.path.lexists(path):
        yield _known(path)
    else:
        found = sorted(glob.glob(path, recursive=True))
        if not found:
            is_pattern = glob.has_magic(path)
            what = "no file matches this pattern" if is_pattern else "there is no such file or folder"
            raise ConfigError(f"input={word}: {what} (in {Path.cwd()}); check the path")
        for one in found:
            yield from _below(one) if os.path.isdir(one) else (_known(one),)


def _known(path: str) -> str:
    if kind_of(path) is None:
        raise ConfigError(f"{path}: the ending says how a file is read, and must be one of {ENDINGS}; rename it")
    return path


def _below(folder: str) -> list[str]:
    def refuse(error: OSError) -> None:
        raise ConfigError(f"{error.filename} cannot be read ({error.strerror}): grant this user permission")

    found = []
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        _refuse_loops(parent, folders)
        if INDEX in names and any(name.endswith(".bin") for name in names):  # token shards, perhaps our own
            folders.clear()
            continue
        found += [os.path.normpath(os.path.join(parent, name)) for name in names if not name.startswith(".")]
    return sorted(found)


def _refuse_loops(parent: str, folders: list[str]) -> None:
    here = os.path.realpath(parent)
    for path in (os.path.join(parent, name) for name in folders):
        target = os.path.realpath(path)
        if os.path.islink(path) and os.path.commonpath([here, target]) == target:
            raise ConfigError(f"{path} links to {target}, a folder that it lies in: remove the link, or name the files")


def _look_at(path: str) -> InputFile:
    try:
        found = os.stat(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): correct or remove it") from error
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path} is not a regular file: give a file, or leave it out")
    kind, packed = kind_of(path) or ("", "")
    return InputFile(path, kind, packed, found.st_size, found.st_mtime_ns)
