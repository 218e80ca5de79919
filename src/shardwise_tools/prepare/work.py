"""The work in progress: a hidden folder beside the output, which a later start goes on with."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.data.tokens import SplitWriter, flush
from shardwise.errors import DataError
from shardwise.run_dir.files import read_text, write_whole
from shardwise_tools.prepare.documents import Part, Position
from shardwise_tools.prepare.worker import SPLITS, Result

INPUTS = "inputs.jsonl"  # path, size and SHA-256 of each input
SKIPPED = "skipped.jsonl"  # what was left out: path, line and rule
TRAINED = "trained"  # the tokenizer that was trained on the inputs
LONE = "backslashreplace"  # how half a surrogate pair is encoded: as JSON writes it. Names that are no UTF-8 have such
_STATE, _IDENTITY, _LISTING = "state.json", "identity.json", "listing.json"
_COMMIT_SECONDS = 2.0  # a killed process has lost this much work


def work_folder(output: Path) -> Path:
    return output.with_name(f".{output.name}.preparing")


def has_begun(folder: Path) -> bool:
    """Whether documents are kept from which a later start goes on."""
    return (folder / _STATE).exists()


def how_to_go_on(folder: Path) -> str:
    """What a later start takes over from this one."""
    if has_begun(folder):
        return f"start with the same words, which goes on from what is done; it is kept in {folder}"
    if (folder / TRAINED).exists():
        return f"start with the same words, which takes the trained tokenizer; it alone is kept, in {folder}"
    return "start with the same words, which begins anew: nothing was done yet that could be kept"


@contextmanager
def locked(output: Path, waits: bool) -> Iterator[Path]:
    """The work folder, which this process alone may use.

    Raises:
        DataError: another process uses it, or it cannot be made.
    """
    folder = work_folder(output)
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise DataError(
                f"{folder} cannot be made ({error.strerror}): give an output= that can be written"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(descriptor)
            raise DataError(
                f"{output} is being prepared by another process: wait for it or stop it, or give another output="
            ) from None
        if folder.exists() and os.fstat(descriptor).st_ino == folder.stat().st_ino:
            break
        os.close(descriptor)  # it was removed by the process that had it
    try:
        yield folder
        shutil.rmtree(folder, ignore_errors=True)  # all is done
    except BaseException:
        if not has_begun(folder) and not (folder / TRAINED).exists():  # there is nothing to go on from
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


@dataclass
class Totals:
    """Sums over what is done."""

    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))  # of text, as UTF-8
    read: int = 0  # bytes of the input files
    skipped: int = 0
    smallest: float = 1.0  # `held_out_number`
    seconds: float = 0.0


class Work:
    """Shards in the making. Parts are added in their order; what is added is kept every few seconds."""

    def __init__(self, folder: Path, vocab_size: int, shard_tokens: int) -> None:
        self.folder, self.shards = folder, folder / "shards"
        self.position, self.totals = Position(), Totals()
        self._writers = {split: SplitWriter(self.shards, split, vocab_size, shard_tokens) for split in SPLITS}
        self._logs: dict[str, BinaryIO] = {}
        self._before = 0.0  # seconds of earlier starts
        self._begun = time.monotonic()
        self._kept = -math.inf  # the first parts of a start are kept at once, so that each start comes further
        self._stack = ExitStack()

    def __enter__(self) -> Work:
        self._restore(json.loads(text) if (text := _read(self.folder / _STATE)) else None)
        for writer in self._writers.values():
            self._stack.enter_context(writer)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    @property
    def is_resumed(self) -> bool:
        return self._before > 0

    def add(self, parts: list[Part], result: Result) -> None:
        """Write what `parts` have become."""
        totals = self.totals
        for split, documents in result.splits.items():
            self._writers[split].add_all(documents.tokens, documents.lengths)
            totals.documents[split] += len(documents.lengths)
            totals.tokens[split] += len(documents.tokens)
            totals.bytes[split] += documents.size
        for part in parts:
            if part.record is not None:
                self._log(INPUTS, part.record)
            totals.read += part.read
        for flaw in result.flaws:
            self._log(SKIPPED, asdict(flaw))
        totals.skipped += len(result.flaws)
        totals.smallest = min(totals.smallest, result.smallest)
        self.position = parts[-1].after
        if time.monotonic() - self._kept > _COMMIT_SECONDS:
            self.keep()

    def keep(self) -> None:
        """From here a later start goes on."""
        for file in self._logs.values():
            flush(file)
        self.totals.seconds = self._before + time.monotonic() - self._begun
        state = {
            "position": asdict(self.position),
            "totals": asdict(self.totals),
            "splits": {split: writer.state() for split, writer in self._writers.items()},
            "lists": {name: file.tell() for name, file in self._logs.items()},
        }
        write_whole(self.folder / _STATE, json.dumps(state))
        self._kept = time.monotonic()

    def finish(self) -> dict[str, list[dict[str, Any]]]:
        """End the last shards. Returns the index's `splits`."""
        self.keep()
        self._stack.close()
        for file in self._logs.values():
            file.close()
        return {split: writer.shards for split, writer in self._writers.items() if writer.shards}

    def _restore(self, state: dict[str, Any] | None) -> None:
        self.shards.mkdir(exist_ok=True)
        if state is not None:
            self.position, self.totals = Position(**state["position"]), Totals(**state["totals"])
            self._before = self.totals.seconds
        for split, writer in self._writers.items():
            writer.restore(state["splits"][split] if state else {"shards": [], "tokens": 0, "documents": 0})
        for name in (INPUTS, SKIPPED):
            length = state["lists"].get(name, 0) if state else 0
            if length:
                file = self._open(name)
                file.truncate(length)
                file.seek(length)
            else:
                (self.shards / name).unlink(missing_ok=True)

    def _open(self, name: str) -> BinaryIO:
        path = self.shards / name
        file = self._logs[name] = self._stack.enter_context(path.open("r+b" if path.exists() else "wb"))
        return file

    def _log(self, name: str, row: dict[str, Any]) -> None:
        line = json.dumps(row, ensure_ascii=False).encode(errors=LONE)
        (self._logs.get(name) or self._open(name)).write(line + b"\n")


def begin_or_go_on(folder: Path, identity: dict[str, Any], listing: list[Any]) -> None:
    """Note what the work is about, or see that it is the same as before.

    Raises:
        DataError: it was begun with other words or inputs.
    """
    before = json.loads(_read(folder / _IDENTITY) or "null")
    if before is not None and (folder / _STATE).exists():
        _refuse_others(folder, before, identity, listing)
        write_whole(folder / _IDENTITY, json.dumps(identity))  # on_error may differ
        return
    if before == identity and json.loads(_read(folder / _LISTING)) == listing:
        return
    for path in folder.iterdir():  # nothing was kept yet, so that nothing is lost
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_whole(folder / _LISTING, json.dumps(listing))
    write_whole(folder / _IDENTITY, json.dumps(identity))


def _refuse_others(folder: Path, before: dict[str, Any], now: dict[str, Any], listing: list[Any]) -> None:
    remedy = f"start it as before to go on, or remove {folder} to begin anew"
    if other := other_word(before["words"], now["words"]):
        raise DataError(f"{folder} holds work that was begun with {other}: {remedy}")
    if before["tokenizer"] != now["tokenizer"]:
        raise DataError(f"{folder} holds work that was begun with another tokenizer of this name: {remedy}")
    earlier = json.loads(_read(folder / _LISTING))
    if earlier != listing:
        pairs = zip([*earlier, *[None] * len(listing)], [*listing, *[None] * len(earlier)], strict=False)
        old, new = next(pair for pair in pairs if pair[0] != pair[1])
        what = f"{(new or old)[0]} " + (
            "has changed since" if old and new and old[0] == new[0] else "is new" if new else "is no longer there"
        )
        raise DataError(f"{folder} holds work that was begun with other inputs: {what}; {remedy}")
    skipped = json.loads(_read(folder / _STATE) or "{}").get("totals", {}).get("skipped", 0)
    if before["on_error"] == "skip" and now["on_error"] == "stop" and skipped:
        raise DataError(f"{folder} holds work with on_error=skip, which has left out {skipped:,}: {remedy}")


def other_word(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The first word that differs: "validation=0.1, and now validation=0.2"; nothing: none does."""
    kinds = {"given": "a tokenizer that was there already", "train": "tokenizer=train"}
    for key, value in now.items():
        if before.get(key) != value:
            was, is_now = (kinds[str(v)] if key == "tokenizer" else f"{key}={v}" for v in (before.get(key), value))
            return f"{was}, and now {is_now}"
    return ""


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): remove {path.parent} to begin anew") from None
