"""The files in benchmarks/results/: what a benchmark records of its command and its machine, and how pages read it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT
from benchmarks.harness.limits import at_most
from shardwise.errors import Left
from shardwise.run_dir.environment import describe_environment, git

RESULTS = ROOT / "benchmarks" / "results"
# What is no code that is measured: results, and the pages that are made from them.
_CODE = ["--", ".", ":(exclude)benchmarks/results", ":(exclude)*.md"]


def read(kind: str) -> list[dict[str, Any]]:
    """The results of one benchmark, one for each file; none where it has not been run."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{kind}-*.json"))]


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
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of results; default: benchmarks/results")
    parser.add_argument("--commit", help="of this code, where it was copied without its history")
    return parser


def chosen(pattern: str, names: Iterable[str]) -> list[str]:
    """The names in which the regular expression of `--only` is found. Ends the program where that is none of them."""
    known = list(names)
    try:
        found = [name for name in known if re.search(pattern, name)]
    except re.error as error:
        sys.exit(f"error: --only {pattern!r} is not a regular expression: {error}")
    return found or sys.exit(f"error: --only {pattern!r} is in none of: {'; '.join(known)}")


def earlier(path: Path) -> dict[str, Any]:
    """What the file holds; nothing where there is none. Ends the program where it cannot be read."""
    try:
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        sys.exit(f"error: {path} is not JSON ({error}): mend it, or move it away")
    return found


def end_on_signals() -> None:
    """SIGTERM ends this program as Ctrl-C does: commands that it has started are ended, and it says one line."""

    def leave(*_: Any) -> None:
        sys.exit("error: ended by a signal; the same command goes on where this one ended")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)


def numbers(text: str) -> list[int]:
    """The type of an option that takes several numbers, separated by commas."""
    return [int(number) for number in text.split(",")]


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
        self.path, self.limit_seconds, self.commit, self.only = path, limit_seconds, commit, only
        self.missing = missing
        self.prepare, self.words = prepare, words
        self.content = head
        if before := earlier(path):
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
        is_there = self.missing and earlier.get("ok") and self.commit and is_same_code(earlier["commit"], self.commit)
        if is_there or not re.search(self.only, f"{section}: {name}"):
            return earlier
        self.prepare()
        started = time.perf_counter()
        row = self._measured(measure, said)
        row |= {"commit": self.commit, "environment": self.content["environment"]}
        row["seconds"] = round(time.perf_counter() - started, 1)
        if row["ok"] or not earlier.get("ok"):  # a failure takes nothing away
            self.section(section)[name] = row
        write(self.path, self.content)
        words = self.words(row) if row["ok"] else f"FAILED, {row['error']}"
        print(f"{section:9} {name}: {words}  ({row['seconds']} s)", flush=True)
        return row

    def skip(self, section: str, why: str) -> None:
        print(f"{section:9} skipped: {why}", flush=True)
        self.section(section)["skipped"] = why
        write(self.path, self.content)

    def _measured(self, measure: Callable[[], dict[str, Any]], said: dict[str, Any]) -> dict[str, Any]:
        try:
            with at_most(self.limit_seconds):
                return {"ok": True, **said, **measure()}
        except Left as left:
            sys.exit(f"error: {left}")
        except Exception as error:
            traceback.print_exc()
            text = "".join(traceback.format_exception(error))
            error.__traceback__ = None  # its frames hold tensors
            what = f"{type(error).__name__}: {error}"[:500]
            return {"ok": False, **said, "error": what, "traceback": text[-4000:]}
