"""Reads a Chrome trace that torch.profiler wrote, and builds a Trace of its events.

On CPU nothing is launched: the operators on the host's threads play the device's part.
"""

from __future__ import annotations

import gc
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import DataError
from shardwise.run_dir.files import read_whole
from shardwise_tools.traces.steps import phase_of
from shardwise_tools.traces.trace import (
    COMMUNICATION,
    COPY,
    KINDS,
    OTHER,
    OVERHEAD,
    UNKNOWN,
    DeviceEvents,
    HostEvents,
    Step,
    Times,
    Trace,
    kind_numbers,
)

COLUMNS = ("name", "begin", "end")
# c10d's record of a collective that a thread of gloo or MPI works on
COLLECTIVE = re.compile(r"^(gloo|mpi|ucc|xccl|ccl):")


def work_of_the_host(names: list[str], operations: HostEvents, annotations: HostEvents) -> DeviceEvents:
    """Each operator's own time, without that of the operators that it called, as if it were a kernel.

    An operator whose name tells no kind has that of its caller; within a collective everything is communication. Views,
    allocations and autograd's nodes compute nothing by themselves: what they take is the host's own time. What runs
    while a batch is made (annotations of the phase `data`) is left out too: that is waiting for data.
    """
    is_collective = np.array([bool(COLLECTIVE.match(name)) for name in names], dtype=bool)
    kinds = kind_numbers(names)
    kinds = [
        KINDS.index(COMMUNICATION) if collective else kind
        for kind, collective in zip(kinds, is_collective, strict=True)
    ]
    is_data = np.array([phase_of(name) == "data" for name in names], dtype=bool)
    wanted = annotations.where(is_collective[annotations.name] | is_data[annotations.name])
    rows: list[tuple[int, int, int, int, int]] = []
    for thread in np.unique(np.concatenate([operations.thread, wanted.thread])).tolist():
        mine = [events.where(events.thread == thread) for events in (operations, wanted)]
        name, begin, end = (np.concatenate([getattr(events, c) for events in mine]).tolist() for c in COLUMNS)
        for piece in _own_times(name, begin, end, kinds, is_data.tolist()):
            if piece[3] == KINDS.index(COMMUNICATION) or not OVERHEAD.search(names[piece[0]]):
                rows.append((*piece[:3], thread, piece[3]))
    names_of, begins, ends, lanes, kinds_of = np.array(sorted(rows, key=lambda row: row[1]), np.int64).reshape(-1, 5).T
    return DeviceEvents(names_of, begins, ends, lanes, kinds_of, begins, lanes)


def _own_times(
    name: list[int], begin: list[int], end: list[int], kinds: list[int], is_data: list[bool]
) -> Iterator[tuple[int, int, int, int]]:  # fmt: skip
    """Name, begin, end and kind of every piece of one thread's time in which one event is the innermost."""
    other, communication = KINDS.index(OTHER), KINDS.index(COMMUNICATION)
    open_events: list[tuple[int, int, int, bool]] = []  # name, end, kind, whether it is left out
    now = 0

    def until(moment: int) -> Iterator[tuple[int, int, int, int]]:
        nonlocal now
        while open_events:
            innermost, its_end, kind, is_out = open_events[-1]
            if not is_out and min(its_end, moment) > now:
                yield innermost, now, min(its_end, moment), kind
            now = max(now, min(its_end, moment))
            if its_end > moment:
                return
            open_events.pop()

    for i in sorted(range(len(name)), key=lambda i: (begin[i], -end[i])):
        yield from until(begin[i])
        now = begin[i]
        kind, is_out = kinds[name[i]], is_data[name[i]]
        if open_events:
            caller, is_out = open_events[-1][2], is_out or open_events[-1][3]
            kind = caller if kind == other or caller == communication else kind
        open_events.append((name[i], end[i], kind, is_out))
    yield from until(max(end, default=0))


HOST_KINDS = ("launch", "operation", "annotation", "frame")


class Build:
    """Collects events. Times are ns; streams, threads and devices are whatever the file names them."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.steps: list[Step] = []
        self._names: dict[str, int] = {}
        self._host: dict[str, list[tuple[int, float, float, int, int]]] = {kind: [] for kind in HOST_KINDS}
        self._device: list[tuple[int, float, float, int, int, bool, int]] = []
        self._threads: dict[Any, int] = {}
        self._lanes: dict[Any, int] = {}

    @property
    def has_events(self) -> bool:
        return bool(self._device or self._host["operation"])

    def add_host(self, kind: str, name: str, begin: float, end: float, thread: Any, link: int = -1) -> None:
        row = (self._number(name), begin, end, self._threads.setdefault(thread, len(self._threads)), int(link))
        self._host[kind].append(row)

    def add_device(
        self, name: str, begin: float, end: float, stream: Any, device: Any, is_copy: bool, link: int = -1
    ) -> None:  # fmt: skip
        lane = stream if isinstance(stream, int) else self._lanes.setdefault(stream, len(self._lanes))
        where = self._threads.setdefault(("device", device), len(self._threads))
        self._device.append((self._number(name), begin, end, lane, where, is_copy, int(link)))

    def trace(self, *, device_name: str = "", host_name: str = "", rank: int | None = None) -> Trace:
        names, notes = list(self._names), []
        launches, operations, annotations, frames = (self._columns(kind) for kind in HOST_KINDS)
        if self._device:
            device, others = self._kernels(names, launches)
            if others:
                notes.append(f"{others} kernels and copies ran on other GPUs than the busiest one: they are left out")
        else:
            device = work_of_the_host(names, operations, annotations)
            if not len(device):
                raise DataError(
                    f"{self.source} has no kernel, and no operator that computes: there is nothing to add up"
                )
        steps = tuple(sorted(set(self.steps), key=lambda step: step.begin))
        if not steps:
            notes.append("the trace names no steps (ProfilerStep#…): all of it counts as one")
            every = [events for events in (device, launches, operations, annotations) if len(events)]
            steps = (Step(0, min(int(e.begin.min()) for e in every), max(int(e.end.max()) for e in every)),)
        return Trace(
            self.source, names, device, launches, operations, annotations, frames, steps, not self._device,
            device_name, host_name, rank, tuple(notes),
        )  # fmt: skip

    def _number(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    def _columns(self, kind: str) -> HostEvents:
        rows = self._host[kind]
        if not rows:
            return HostEvents.of([])
        name, begin, end, thread, link = (
            np.rint(np.array(column)).astype(np.int64) for column in zip(*rows, strict=True)
        )
        order = np.lexsort((-end, begin))  # of two that begin together, the outer one comes first
        return HostEvents(name[order], begin[order], end[order], thread[order], link[order])

    def _kernels(self, names: list[str], launches: HostEvents) -> tuple[DeviceEvents, int]:
        """The events of the device that was busiest, and how many ran on others."""
        columns = [np.rint(np.array(column)).astype(np.int64) for column in zip(*self._device, strict=True)]
        name, begin, end, lane, where, is_copy, link = columns
        busiest = np.bincount(where, weights=end - begin).argmax()
        order = np.argsort(begin, kind="stable")
        order = order[where[order] == busiest]
        name, begin, end, lane, is_copy, link = (c[order] for c in (name, begin, end, lane, is_copy, link))
        kind = np.where(is_copy == 1, KINDS.index(COPY), np.array(kind_numbers(names), dtype=np.int64)[name])
        launched, thread = _launches_of(link, launches)
        # Without any launch each kernel counts as launched when it began, so that it belongs to the step of that time
        launched = _filled_in(launched, lane) if (launched != UNKNOWN).any() else begin
        return DeviceEvents(name, begin, end, lane, kind, launched, thread), len(where) - len(order)


def _launches_of(link: Times, launches: HostEvents) -> tuple[Times, Times]:
    """When and by which thread each kernel was launched; kernels of a CUDA graph share their launch."""
    known = np.flatnonzero(launches.link >= 0)
    if not len(known):
        return np.full(len(link), UNKNOWN), np.full(len(link), -1, dtype=np.int64)
    known = known[np.argsort(launches.link[known], kind="stable")]
    links = launches.link[known]
    at = np.minimum(np.searchsorted(links, link), len(links) - 1)
    found = (links[at] == link) & (link >= 0)
    launched = np.where(found, launches.begin[known[at]], UNKNOWN)
    return launched, np.where(found, launches.thread[known[at]], -1)


def _filled_in(launched: Times, lane: Times) -> Times:
    """A kernel whose launch the trace does not have was launched no earlier than the one before it on its stream; at
    the beginning of a stream it stays UNKNOWN: it was launched before the trace began."""
    result = launched.copy()
    for stream in np.unique(lane):
        rows = np.flatnonzero(lane == stream)
        result[rows] = np.maximum.accumulate(launched[rows])
    return result


# Categories of events → what they are; older versions of torch wrote them with capital letters.
CATEGORIES = {
    "kernel": "kernel",
    "gpu_memcpy": "copy", "memcpy": "copy", "gpu_memset": "copy", "memset": "copy",
    "cuda_runtime": "launch", "cuda_driver": "launch", "runtime": "launch", "hip_runtime": "launch",
    "xpu_runtime": "launch", "privateuse1_runtime": "launch",
    "cpu_op": "operation", "operator": "operation",
    "user_annotation": "annotation",
    "python_function": "frame",
}  # fmt: skip
STEP = re.compile(r"(?:ProfilerStep|shardwise::step)\s*#\s*(\d+)$")


def read_trace(path: str | Path) -> Trace:
    """Read a Chrome trace of torch.profiler: `.json`, or `.json.gz`.

    Raises:
        DataError: the file is missing, cut short, or not such a trace.
    """
    with _collector_off():
        return _read(Path(path))


def _read(path: Path) -> Trace:
    content = _load(path)
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise DataError(f"{path} is no trace of torch.profiler: it is JSON without a list traceEvents")
    build = Build(path)
    try:
        for event in events:
            _add(build, event)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is no trace of torch.profiler: an event is malformed ({error!r})") from None
    if not build.has_events:
        raise DataError(
            f"{path} has no kernel and no operator: nothing was recorded; torch.profiler writes what can be read"
        )
    return build.trace(**_about(content if isinstance(content, dict) else {}))


@contextmanager
def _collector_off() -> Iterator[None]:
    """Python's garbage collector looks again and again through millions of objects, none of which is garbage yet: a
    third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _load(path: Path) -> Any:
    try:
        data = read_whole(path)
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        # A name that is not UTF-8 is no reason to refuse the whole trace
        return json.loads(text.decode(errors="replace"), strict=False)
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile):
            raise DataError(f"{path} is damaged: {error}") from None
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error):
        raise DataError(f"{path} is cut short: its compressed data end too early; record the profile again") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is cut short, or no JSON: {error}; record the profile again") from None


def _add(build: Build, event: dict[str, Any]) -> None:
    if event.get("ph") != "X":
        return
    kind = CATEGORIES.get(str(event.get("cat", "")).lower())
    if kind is None:
        return
    name, begin = event["name"], event["ts"] * 1000
    end, args = begin + event.get("dur", 0) * 1000, event.get("args") or {}
    link = args.get("correlation", -1)
    if kind in ("kernel", "copy"):
        lane = args.get("stream", event.get("tid", -1))
        build.add_device(name, begin, end, lane, args.get("device", event.get("pid", 0)), kind == "copy", link)
    else:
        build.add_host(kind, name, begin, end, event.get("tid", -1), link)
        if kind == "annotation" and (match := STEP.match(name)):
            build.steps.append(Step(int(match[1]), round(begin), round(end)))


def _about(content: dict[str, Any]) -> dict[str, Any]:
    """The trace's own words on where it was recorded."""
    devices = content.get("deviceProperties") or [{}]
    return {
        "device_name": str(devices[0].get("name", "")),
        "host_name": str(content.get("host_name", "")),
        "rank": (content.get("distributedInfo") or {}).get("rank"),
    }
