"""Reads a profile of Nsight Systems that `nsys export --type sqlite` has converted.

Not run against a real nsys: the tables are those of its documentation.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from shardwise.errors import DataError
from shardwise.metrics.profile.build import Build
from shardwise.metrics.profile.chrome import STEP
from shardwise.metrics.profile.trace import Step, Trace

PUSH_POP, START_END = 59, 60  # types of NVTX_EVENTS: ranges of a thread, and ranges of a process
COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}


def read_nsys_sqlite(path: str | Path) -> Trace:
    """Read what `nsys export --type sqlite` wrote.

    Raises:
        DataError: the file is missing, damaged, or not such an export, or nothing ran on a GPU.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path} cannot be read: there is no such file")
    build = Build(path)
    about: dict[str, Any] = {}
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            _read(database, build)
            about["device_name"] = next((str(row["name"]) for row in _rows(database, "TARGET_INFO_GPU")), "")
    except (sqlite3.DatabaseError, IndexError, KeyError) as error:
        raise DataError(f"{path} is no export of nsys: {error}; nsys export --type sqlite makes one") from None
    if not build.has_events:
        raise DataError(f"{path} has no kernel: profile with nsys profile --trace=cuda,nvtx, and export it anew")
    return build.trace(**about)


def _read(database: sqlite3.Connection, build: Build) -> None:
    if not any(_rows(database, "StringIds")):
        raise KeyError("it has no table StringIds")
    text = {row["id"]: row["value"] for row in _rows(database, "StringIds")}
    for row in _rows(database, "CUPTI_ACTIVITY_KIND_KERNEL"):
        name = text.get(row["demangledName"]) or text.get(row["shortName"]) or "unnamed kernel"
        _add_device(build, row, name, is_copy=False)
    for row in _rows(database, "CUPTI_ACTIVITY_KIND_MEMCPY"):
        _add_device(build, row, f"Memcpy {COPY_KINDS.get(row['copyKind'], row['copyKind'])}", is_copy=True)
    for row in _rows(database, "CUPTI_ACTIVITY_KIND_MEMSET"):
        _add_device(build, row, "Memset", is_copy=True)
    for row in _rows(database, "CUPTI_ACTIVITY_KIND_RUNTIME"):
        name = text.get(row["nameId"], "").partition("_v")[0]  # cudaLaunchKernel_v7000
        build.add_host("launch", name, row["start"], row["end"], row["globalTid"], row["correlationId"])
    for row in _rows(database, "NVTX_EVENTS"):
        _add_range(build, row, text)


def _add_device(build: Build, row: sqlite3.Row, name: str, *, is_copy: bool) -> None:
    build.add_device(name, row["start"], row["end"], row["streamId"], row["deviceId"], is_copy, row["correlationId"])


def _add_range(build: Build, row: sqlite3.Row, text: dict[int, str]) -> None:
    name = row["text"] or text.get(row["textId"])
    if row["eventType"] not in (PUSH_POP, START_END) or not name or row["end"] is None:
        return
    build.add_host("annotation", name, row["start"], row["end"], row["globalTid"])
    if match := STEP.match(name):
        build.steps.append(Step(int(match[1]), row["start"], row["end"]))


def _rows(database: sqlite3.Connection, table: str) -> Iterator[sqlite3.Row]:
    """The rows of a table, or nothing: nsys leaves out tables that would be empty."""
    known = database.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)).fetchone()
    if known:
        yield from database.execute(f'SELECT * FROM "{table}"')
