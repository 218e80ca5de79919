"""Limits of time, and separate processes for what may hang, die, or leave something behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT


class OutOfTimeError(Exception):
    """A part that ran past its limit."""


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Inside, what takes longer than `seconds` raises OutOfTimeError. In the main thread only."""

    def stop(*_: Any) -> None:
        raise OutOfTimeError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 30)  # repeated, in case a compiler swallows the first exception
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, timeout_seconds: float) -> list[Any]:
    """What `function(*arguments)` returns on each of `ranks` processes. Raises AssertionError with the ranks'
    tracebacks where one fails, or where they take longer than `timeout_seconds`."""
    from tests.harness.processes import spawn

    here = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    earlier = os.environ.get("PYTHONPATH", "")
    if not earlier.startswith(here):  # The server that forks the ranks finds modules by this variable.
        os.environ["PYTHONPATH"] = os.pathsep.join([here, earlier])
    return spawn(ranks, function, *arguments, timeout_seconds=timeout_seconds)


def rows_of_ranks(
    ranks: int, function: Callable[..., Any], *arguments: Any, timeout_seconds: float
) -> tuple[list[dict[str, Any]], str]:
    """What `function(folder, *arguments)` has written down on `ranks` processes with `note`, and the ranks' tracebacks
    where they failed or took longer than `timeout_seconds`; else an empty text."""
    with tempfile.TemporaryDirectory() as name:
        folder, error = Path(name), ""
        try:
            on_ranks(ranks, function, folder, *arguments, timeout_seconds=timeout_seconds)
        except AssertionError as failed:
            error = str(failed)[-3000:]
        return noted(folder), error


def note(folder: Path, row: dict[str, Any]) -> None:
    """Rank 0 writes a row down as soon as it is measured: it stays when a rank dies later."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        with (folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def noted(folder: Path) -> list[dict[str, Any]]:
    """The rows that the ranks have written down; none if they failed before the first one."""
    file = folder / "rows.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
