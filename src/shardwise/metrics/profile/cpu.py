"""On CPU nothing is launched: the operators on the host's threads play the device's part."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from shardwise.metrics.profile.kinds import COMMUNICATION, KINDS, OTHER, OVERHEAD, kind_numbers
from shardwise.metrics.profile.phases import phase_of
from shardwise.metrics.profile.trace import DeviceEvents, HostEvents

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
