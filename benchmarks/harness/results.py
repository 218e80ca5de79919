"""The files in benchmarks/results/: what a benchmark records of its command and its machine, and how pages read it."""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import re
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT
from benchmarks.harness.limits import at_most
from shardwise.errors import Left
from shardwise.run_dir.events import describe_environment, git

RESULTS = ROOT / "benchmarks" / "results"
ENDED = "error: ended by a signal; what the file of results had by then is still in it"
# What is no code that is measured: results, and the pages that are made from them.
_CODE = ["--", ".", ":(exclude)benchmarks/results", ":(exclude)*.md"]


def read(kind: str) -> list[dict[str, Any]]:
    """The results of one benchmark, one for each file; none where it has not been run. Those of small models, which
    only try it out, are not among them."""
    found = map(_content, sorted(RESULTS.glob(f"{kind}-*.json")))
    return [result for result in found if not result.get("tiny")]


def write(path: Path, result: Any) -> None:
    """Writes the whole result, or leaves the file as it was. Benchmarks write after every part, so that a run that is
    cut short keeps what it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(beside, path)


def command_line(doc: str | None, *, accelerator: str | None = "cuda") -> argparse.ArgumentParser:
    """A parser with the options that benchmarks have in common. `accelerator` is the default; None where there is no
    choice."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if accelerator is not None:
        parser.add_argument("--accelerator", choices=["cuda", "cpu"], default=accelerator)
    parser.add_argument("--out", type=folder, default=RESULTS, help="folder of results; default: benchmarks/results")
    parser.add_argument("--commit", help="of this code, where it was copied without its history")
    return parser


def chosen(pattern: str, names: Iterable[str]) -> list[str]:
    """The names in which the regular expression of `--only` is found. Ends the program where that is none of them."""
    known, looked_for = list(names), _expression(pattern)
    found = [name for name in known if looked_for.search(name)]
    return found or sys.exit(f"error: --only {pattern!r} is in none of: {'; '.join(known)}")


def _expression(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        sys.exit(f"error: --only {pattern!r} is not a regular expression: {error}")


def earlier(path: Path, look: Callable[[dict[str, Any]], Any] = len) -> dict[str, Any]:
    """What the file holds; nothing where there is none. `look` looks for all that the program will take from it. Ends
    the program where that is not there, and where another process goes on with the same file."""
    _claim(path)
    found = _content(path) if path.exists() else {}
    try:
        if found:
            look(found)
    except (AttributeError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        sys.exit(f"error: {path} is no result of this benchmark ({what}): mend it, or move it away")
    return found


def _content(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"error: {path} is not JSON ({error}): mend it, or move it away")
    if not isinstance(found, dict):
        sys.exit(f"error: {path} is no result, but a {type(found).__name__}: mend it, or move it away")
    return found


def _claim(path: Path) -> None:
    """Of two processes that go on with one file, each would write it without what the other has measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666)  # open as long as this process lives
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"error: another process writes {path}: wait until it has ended, or give another --out")
    except OSError:  # a file system without locks, such as Lustre without its option `flock`
        pass


def end_on_signals() -> None:
    """SIGTERM ends this program as Ctrl-C does: what it has started is ended, and it says one line."""

    def leave(*_: Any) -> None:
        sys.exit(ENDED)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)


# Types of options. What they refuse argparse says in one line, before anything runs.


def folder(text: str) -> Path:
    """A folder that can be written to; it is made."""
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=text).close()
    except OSError as error:
        reason = f"{text!r} is no folder that can be written to ({error.strerror}): give another"
        raise argparse.ArgumentTypeError(reason) from None
    return Path(text)


def numbers(text: str) -> list[int]:
    """Several numbers from 1, separated by commas."""
    found = [int(number) for number in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers from 1")
    return found


def seconds(text: str) -> float:
    if not 0 < (found := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of seconds above 0")
    return found


def names(known: Collection[str]) -> Callable[[str], list[str]]:
    """Several of these names, separated by commas."""

    def split(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of: {', '.join(known)}")
        return text.split(",")

    return split


def command() -> str:
    """The command line of this process, as the result records it: without the folder that it is written to."""
    words = sys.argv[1:]
    if "--out" in words:
        at = words.index("--out")
        words = words[:at] + words[at + 2 :]
    script = Path(sys.argv[0]).resolve()
    return shlex.join(["python", str(script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name), *words])


def measured_on(accelerator: str, commit: str | None) -> tuple[dict[str, Any], str]:
    """The environment without the machine's name, and the device as it is named in the names of files. `commit` is
    given where the code was copied without its history."""
    environment = describe_environment()
    del environment["hostname"]
    if commit or environment["commit"]:
        changes = None if commit else bool(git("status", "--porcelain", *_CODE, folder=ROOT))
        environment |= {"commit": commit or environment["commit"], "uncommitted_changes": changes}
    if accelerator == "cuda" and not environment["gpus"]:
        sys.exit("error: there is no GPU here; --accelerator cpu --tiny tries the script out")
    gpu = environment["gpus"][0] if accelerator == "cuda" else "cpu"
    return environment, re.sub(r"[^a-z0-9]+", "-", gpu.lower())


def is_of_commit(earlier: dict[str, Any], environment: dict[str, Any], given: str | None) -> bool:
    """Whether what an earlier environment has measured was measured with this code. With changes that are in no commit
    nobody knows. `given`: the commit of the command line."""
    known = environment["commit"] and (given or not environment["uncommitted_changes"])
    return bool(known) and is_same_code(earlier["commit"], environment["commit"])


@cache
def is_same_code(one: str | None, other: str) -> bool:
    """Whether two commits differ at most in results and pages. Where the history is absent they must be equal."""
    return one == other or (one is not None and git("diff", "--quiet", one, other, *_CODE, folder=ROOT) is not None)


class Parts:
    """A result that is made of sections and their parts. A part that fails or takes too long is recorded with its
    error, and the next one begins; what earlier runs have measured stays in the file, with their environments."""

    def __init__(
        self, path: Path, head: dict[str, Any], *, limit_seconds: int, commit: str | None, only: str,
        prepare: Callable[[], None], words: Callable[[dict[str, Any]], str], missing: bool = False,
    ) -> None:  # fmt: skip
        """`missing`: what an earlier run has measured at the same commit is not measured again."""
        self.path, self.limit_seconds, self.commit, self.only = path, limit_seconds, commit, _expression(only)
        self.missing = missing
        self.prepare, self.words = prepare, words
        self.content = head
        self.names: list[str] = []  # of all parts, those that `only` leaves out too
        self.failed = False
        if before := earlier(path, _look_at_parts):
            if before["tiny"] != head["tiny"]:
                sys.exit(f"error: {path} was measured with{'' if before['tiny'] else 'out'} --tiny: give another --out")
            self.content = head | {"sections": before["sections"]}
        for part in (part for section in self.content["sections"].values() for part in section.values()):
            if isinstance(part, dict):
                part.setdefault("environment", before["environment"])

    def section(self, name: str) -> dict[str, Any]:
        return self.content["sections"].setdefault(name, {})  # type: ignore[no-any-return]

    def part(self, section: str, name: str, measure: Callable[[], dict[str, Any]], **said: Any) -> dict[str, Any]:
        """Measures the part `name`; if `only` leaves it out by section and name, it is the one of the earlier run."""
        earlier: dict[str, Any] = self.section(section).get(name, {})
        self.names.append(f"{section}: {name}")
        is_there = self.missing and earlier.get("ok") and self.commit and is_same_code(earlier["commit"], self.commit)
        if is_there or not self.only.search(self.names[-1]):
            return earlier
        self.prepare()
        started = time.perf_counter()
        row = self._measured(measure, said)
        row |= {"commit": self.commit, "environment": self.content["environment"]}
        row["seconds"] = round(time.perf_counter() - started, 1)
        if row["ok"] or not earlier.get("ok"):  # a failure takes nothing away
            self.section(section)[name] = row
            self.section(section).pop("skipped", None)
        self.failed |= not row["ok"]
        write(self.path, self.content)
        words = self.words(row) if row["ok"] else f"FAILED, {row['error']}"
        print(f"{section:9} {name}: {words}  ({row['seconds']} s)", flush=True)
        return row

    def skip(self, section: str, why: str) -> None:
        print(f"{section:9} skipped: {why}", flush=True)
        if not self.section(section):  # what was measured elsewhere stays
            self.section(section)["skipped"] = why
            write(self.path, self.content)

    def end(self) -> None:
        """Says where the result is. Ends the program where there is none, or where a part failed."""
        chosen(self.only.pattern, self.names)
        print(f"written: {self.path}", flush=True)
        if self.failed:
            sys.exit("error: a part failed, see above; what was recorded of it before is still in the file")

    def _measured(self, measure: Callable[[], dict[str, Any]], said: dict[str, Any]) -> dict[str, Any]:
        try:
            with at_most(self.limit_seconds):
                return {"ok": True, **said, **measure()}
        except Left:  # a Trainer has seen the signal first
            sys.exit(ENDED)
        except Exception as error:
            traceback.print_exc()
            text = "".join(traceback.format_exception(error))
            error.__traceback__ = None  # its frames hold tensors
            what = f"{type(error).__name__}: {error}"[:500]
            return {"ok": False, **said, "error": what, "traceback": text[-4000:]}


def _look_at_parts(before: dict[str, Any]) -> None:
    before["tiny"], before["environment"], [section.values() for section in before["sections"].values()]
