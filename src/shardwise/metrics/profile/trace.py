"""What a trace holds, in columns: the device's work, what the host did meanwhile, and where steps begin and end.

Times are whole nanoseconds of one clock. Names are numbers: `names[name]` is the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]
UNKNOWN = np.iinfo(np.int64).min  # when a kernel was launched that no launch in the trace belongs to


class Step(NamedTuple):
    """One profiled step on the host, in ns."""

    number: int
    begin: int
    end: int


@dataclass(frozen=True)
class HostEvents:
    """Events of one kind on the host, in the order in which they begin; n in each column."""

    name: Times
    begin: Times  # ns
    end: Times
    thread: Times
    link: Times  # connects a launch with its kernels; -1: nothing is connected

    def __len__(self) -> int:
        return len(self.begin)

    def where(self, mask: NDArray[np.bool_]) -> HostEvents:
        return HostEvents(self.name[mask], self.begin[mask], self.end[mask], self.thread[mask], self.link[mask])

    @staticmethod
    def of(rows: Iterable[tuple[int, int, int, int, int]]) -> HostEvents:
        """Rows of name, begin, end, thread, link."""
        columns = np.array(sorted(rows, key=lambda row: row[1]), dtype=np.int64).reshape(-1, 5).T
        return HostEvents(*columns)


@dataclass(frozen=True)
class DeviceEvents:
    """What the device ran, in the order in which it began: kernels, copies, memsets. On CPU: the host's operations."""

    name: Times
    begin: Times  # ns
    end: Times
    lane: Times  # the stream; on CPU the thread
    kind: Times  # a number of kinds.KINDS
    launched: Times  # when the host launched it; UNKNOWN: the trace does not have it
    thread: Times  # which launched it; -1: not known

    def __len__(self) -> int:
        return len(self.begin)

    def where(self, mask: NDArray[np.bool_]) -> DeviceEvents:
        columns = (self.name, self.begin, self.end, self.lane, self.kind, self.launched, self.thread)
        return DeviceEvents(*(column[mask] for column in columns))


@dataclass(frozen=True)
class Trace:
    """A trace of some steps of one rank."""

    source: Path
    names: list[str]
    device: DeviceEvents
    launches: HostEvents  # calls of CUDA's or HIP's runtime and driver, the synchronising ones too
    operations: HostEvents  # torch's operators
    annotations: HostEvents  # record_function, NVTX ranges
    frames: HostEvents  # Python's functions, where stacks were recorded
    steps: tuple[Step, ...]  # never empty
    is_cpu: bool  # no kernel was recorded: the operations of the host play the device's part
    device_name: str = ""
    host_name: str = ""
    rank: int | None = None
    notes: tuple[str, ...] = ()  # what a reader of the figures has to know

    @property
    def main_thread(self) -> int:
        """The thread of the steps' annotations; without them the one that launched most."""
        begins = {step.begin for step in self.steps}
        mine = [
            int(t) for t, b in zip(self.annotations.thread, self.annotations.begin, strict=True) if int(b) in begins
        ]
        known = self.device.thread[self.device.thread >= 0]
        return mine[0] if mine else int(np.bincount(known).argmax()) if len(known) else -1
