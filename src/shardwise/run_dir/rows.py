"""Reads the rows of metrics.csv and ranks.csv."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from shardwise.run_dir.files import keep_earlier
from shardwise.run_dir.reading import lines_of

T = TypeVar("T")
_NO_TEXT = "\ufffd"  # what Python reads in place of bytes that are no text


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of such a file, each with its step; none where there is no file.

    A last row that a kill cut short, and rows that are no text, are left out.
    """
    if not path.exists():
        return []
    whole = [line for n, line in enumerate(lines_of(path)) if line.endswith("\n") and (n == 0 or _NO_TEXT not in line)]
    return [row for row in readable(csv.DictReader(whole)) if (row.get("step") or "").isdigit()]


def keep_unless_goes_on(path: Path, step: int) -> None:
    """Put the rows of an earlier start aside, and say so, if a run from `step` on goes on with none of them."""
    if not path.exists():
        return
    has_steps = "step" in next(readable(csv.reader(lines_of(path))), [])
    why = "has no column named step" if not has_steps else "is of a start that left no checkpoint"
    if (step == 0 or not has_steps) and (kept := keep_earlier(path, "")) is not None:
        print(f"{path} {why}: a new one begins, and it is kept as {kept.name}", flush=True)


def readable(reader: Iterator[T]) -> Iterator[T]:
    """What a reader of the csv module finds, without the lines that are no csv.

    A power failure may leave thousands of zero bytes in a file, which the module takes for a field that is too long.
    """
    while True:
        try:
            yield from reader
            return
        except csv.Error:
            continue
