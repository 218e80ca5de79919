"""Builds a Trace from events as they are read: the same for every format of file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import DataError
from shardwise.metrics.profile.cpu import work_of_the_host
from shardwise.metrics.profile.kinds import COPY, KINDS, kind_numbers
from shardwise.metrics.profile.trace import UNKNOWN, DeviceEvents, HostEvents, Step, Times, Trace

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
