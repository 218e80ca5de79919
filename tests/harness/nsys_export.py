"""Writes what `nsys export --type sqlite` would, by hand, so that every figure of a reader is known. Times are µs."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

# As NVIDIA documents them for the release 2026.4; nsys makes a table only where there is something to put in
SCHEMA = "3.28.1"
_DEVICE = "start end deviceId contextId greenContextId streamId correlationId globalPid"
TABLES = {
    "StringIds": "id value",
    "META_DATA_EXPORT": "name value",
    "TARGET_INFO_GPU": "vmId id name busLocation isDiscrete l2CacheSize totalMemory memoryBandwidth clockRate smCount "
    "uuid chipName cuDevice",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{_DEVICE} demangledName shortName mangledName launchType cacheConfig "
    "registersPerThread gridX gridY gridZ blockX blockY blockZ staticSharedMemory dynamicSharedMemory "
    "localMemoryPerThread localMemoryTotal gridId sharedMemoryExecuted graphNodeId sharedMemoryLimitConfig graphId",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{_DEVICE} graphId graphExecId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{_DEVICE} bytes copyKind deprecatedSrcId srcKind dstKind srcDeviceId srcContextId "
    "dstDeviceId dstContextId migrationCause graphNodeId virtualAddress copyCount",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{_DEVICE} value bytes graphNodeId memKind",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start end eventClass globalTid correlationId nameId returnValue callchainId",
    "NVTX_EVENTS": "start end eventType rangeId category color text globalTid endGlobalTid textId domainId uint64Value "
    "int64Value doubleValue uint32Value int32Value floatValue jsonTextId jsonText binaryData",
    "OSRT_API": "start end eventClass globalTid correlationId nameId returnValue nestingLevel callchainId",
}
COPY_TO_HOST, PUSH_POP, MARK = 2, 59, 34


class NsysExport:
    """Collects events of processes, and writes them. A kernel, copy or memset is launched by the main thread of its
    process at `launched`; None: the export does not have the call."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
        self._strings: dict[str, int] = {}
        self._correlation = 0
        self.add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value=SCHEMA)

    def gpu(self, number: int, name: str) -> None:
        self.add("TARGET_INFO_GPU", id=number, name=name, cuDevice=number)

    def kernel(self, name: str, begin: int, end: int, **more: Any) -> None:
        text = self.text(name)
        self._on_device("KERNEL", begin, end, demangledName=text, shortName=text, **more)

    def copy_to_host(self, begin: int, end: int, **more: Any) -> None:
        self._on_device("MEMCPY", begin, end, copyKind=COPY_TO_HOST, bytes=4, **more)

    def memset(self, begin: int, end: int, **more: Any) -> None:
        self._on_device("MEMSET", begin, end, value=0, bytes=4, **more)

    def graph(self, begin: int, end: int, **more: Any) -> None:
        self._on_device("GRAPH_TRACE", begin, end, graphId=1, **more)

    def call(self, name: str, begin: int, end: int, process: int = 1) -> int:
        """Returns what connects the call with what it has launched."""
        self._correlation += 1
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME", start=begin * 1000, end=end * 1000, globalTid=_thread(process),
            correlationId=self._correlation, nameId=self.text(name), eventClass=0, returnValue=0,
        )  # fmt: skip
        return self._correlation

    def range(self, name: str, begin: int, end: int | None, process: int = 1, *, registered: bool = False) -> None:
        """A range of NVTX; without an end, a mark. `registered`: its name is a registered string."""
        self.add(
            "NVTX_EVENTS", start=begin * 1000, end=None if end is None else end * 1000, globalTid=_thread(process),
            eventType=MARK if end is None else PUSH_POP, text=None if registered else name,
            textId=self.text(name) if registered else None,
        )  # fmt: skip

    def text(self, value: str) -> int:
        return self._strings.setdefault(value, len(self._strings) + 1)

    def add(self, table: str, **columns: Any) -> None:
        self.rows[table].append(columns)

    def write(self, path: Path, *, renamed: dict[str, str] | None = None, without: tuple[str, ...] = ()) -> Path:
        """`renamed`: column → its name in another version. `without`: tables that are left out."""
        self.rows["StringIds"] = [{"id": number, "value": value} for value, number in self._strings.items()]
        with closing(sqlite3.connect(path)) as database, database:
            for table, rows in self.rows.items():
                if not rows or table in without:
                    continue
                columns = [(renamed or {}).get(column, column) for column in TABLES[table].split()]
                database.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
                marks = ", ".join("?" * len(columns))
                values = [[row.get(column) for column in TABLES[table].split()] for row in rows]
                database.executemany(f"INSERT INTO {table} VALUES ({marks})", values)
        return path

    def _on_device(
        self, table: str, begin: int, end: int, *, stream: int = 7, device: int = 0, process: int = 1,
        launched: int | None = None, **columns: Any,
    ) -> None:  # fmt: skip
        launch = None if launched is None else self.call("cudaLaunchKernel_v7000", launched, launched + 1, process)
        self.add(
            f"CUPTI_ACTIVITY_KIND_{table}", start=begin * 1000, end=end * 1000, deviceId=device, streamId=stream,
            contextId=1, correlationId=launch, globalPid=process << 24, **columns,
        )  # fmt: skip


def _thread(process: int) -> int:
    return (process << 24) + 9
