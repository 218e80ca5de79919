"""Reads a profile of Nsight Systems that `nsys export --type sqlite` has converted.

Not run against a real nsys: the tables are those of its documentation, schema 3.28 of the release 2026.4.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from shardwise.errors import DataError
from shardwise.metrics.profile.build import Build
from shardwise.metrics.profile.chrome import STEP
from shardwise.metrics.profile.trace import Step, Trace

PUSH_POP, START_END = 59, 60  # types of NVTX_EVENTS: ranges of a thread, and ranges of a process
COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
SCHEMA = 3  # with the next number everything may be different
_DEVICE = ("start", "end", "deviceId", "streamId", "correlationId")
# The columns that are read; an event's process (globalPid) is used where it is there
COLUMNS = {
    "StringIds": ("id", "value"),
    "META_DATA_EXPORT": ("name", "value"),
    "TARGET_INFO_GPU": ("id", "name"),
    "CUPTI_ACTIVITY_KIND_KERNEL": (*_DEVICE, "demangledName", "shortName"),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": _DEVICE,
    "CUPTI_ACTIVITY_KIND_MEMCPY": (*_DEVICE, "copyKind"),
    "CUPTI_ACTIVITY_KIND_MEMSET": _DEVICE,
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("start", "end", "correlationId", "globalTid", "nameId"),
    "NVTX_EVENTS": ("start", "end", "eventType", "text", "textId", "globalTid"),
}


class _OtherSchema(Exception):
    """The tables are not those that this module knows."""


def read_nsys_sqlite(path: str | Path, *, device: int | None = None) -> Trace:
    """Read what `nsys export --type sqlite` wrote.

    Where nsys has followed several ranks, one of their processes is read: the one that used `device`, by default the
    one whose kernels took longest.

    Raises:
        DataError: the file is missing, damaged, or not such an export, or nothing ran on (this) GPU.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path} cannot be read: there is no such file")
    build = Build(path)
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            _check_schema(database)
            device_name = _read(database, build, device)
    except _OtherSchema as error:
        raise DataError(
            f"{path} cannot be read: {error}; look at the report in nsys-ui, or export it with another version of nsys"
        ) from None
    except sqlite3.DatabaseError as error:
        raise DataError(
            f"{path} is no export of nsys, or is damaged: {error}; nsys export --type sqlite makes one"
        ) from None
    if not build.has_events:
        where = "" if device is None else f" on GPU {device}"
        raise DataError(f"{path} has no kernel{where}: profile with nsys profile --trace=cuda,nvtx, and export it anew")
    return build.trace(device_name=device_name)


def _check_schema(database: sqlite3.Connection) -> None:
    about = {row["name"]: str(row["value"]) for row in _rows(database, "META_DATA_EXPORT")}
    version = about.get("EXPORT_SCHEMA_VERSION", "")
    major = version.partition(".")[0]
    if major.isdecimal() and int(major) > SCHEMA:
        raise _OtherSchema(f"its tables have nsys' schema {version}, and schema {SCHEMA} is known")
    for table, columns in COLUMNS.items():
        known = {row["name"] for row in database.execute(f'PRAGMA table_info("{table}")')}
        if known and (missing := [column for column in columns if column not in known]):
            said = f" (nsys' schema {version})" if version else ""
            raise _OtherSchema(f"its table {table} has no column {', '.join(missing)}{said}")


def _read(database: sqlite3.Connection, build: Build, device: int | None) -> str:
    """Returns the GPU's name."""
    text = {row["id"]: row["value"] for row in _rows(database, "StringIds")}
    if not text:
        raise sqlite3.DatabaseError("it has no table StringIds, or an empty one")
    work = [*_device_rows(database, text)]
    spent: Counter[tuple[int, int]] = Counter()  # (process, device) → ns
    for row, _, _ in work:
        spent[_process(row), row["deviceId"]] += row["end"] - row["start"]
    chosen = [key for key, _ in spent.most_common() if device in (None, key[1])]
    if not chosen:
        return ""
    process, gpu = chosen[0]
    for row, name, is_copy in work:
        if (_process(row), row["deviceId"]) == (process, gpu):
            link = row["correlationId"]
            build.add_device(
                name, row["start"], row["end"], row["streamId"], gpu, is_copy, -1 if link is None else link
            )
    for row in _rows(database, "CUPTI_ACTIVITY_KIND_RUNTIME"):
        if row["correlationId"] is not None and _process(row) == process:
            name = text.get(row["nameId"], "").partition("_v")[0]  # cudaLaunchKernel_v7000
            build.add_host("launch", name, row["start"], row["end"], row["globalTid"], row["correlationId"])
    for row in _rows(database, "NVTX_EVENTS"):
        if _process(row) == process:
            _add_range(build, row, text)
    return next((str(row["name"]) for row in _rows(database, "TARGET_INFO_GPU") if row["id"] == gpu), "")


def _device_rows(database: sqlite3.Connection, text: dict[int, str]) -> Iterator[tuple[sqlite3.Row, str, bool]]:
    """Whatever ran on a GPU: its row, its name, whether a copy engine did it."""
    for row in _rows(database, "CUPTI_ACTIVITY_KIND_KERNEL"):
        yield row, text.get(row["demangledName"]) or text.get(row["shortName"]) or "unnamed kernel", False
    for row in _rows(database, "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"):
        yield row, "a whole CUDA graph (--cuda-graph-trace=node shows its kernels)", False
    for row in _rows(database, "CUPTI_ACTIVITY_KIND_MEMCPY"):
        yield row, f"Memcpy {COPY_KINDS.get(row['copyKind'], row['copyKind'])}", True
    for row in _rows(database, "CUPTI_ACTIVITY_KIND_MEMSET"):
        yield row, "Memset", True


def _process(row: sqlite3.Row) -> int:
    """The process of an event: the lowest 24 bits of nsys' global numbers are the thread."""
    known = row.keys()
    number = next((row[name] for name in ("globalPid", "globalTid") if name in known and row[name] is not None), 0)
    return int(number) >> 24


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
