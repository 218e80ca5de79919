"""Where each step of the device begins and ends, which phases it has, and why the device did nothing in between.

Phases go by the names of annotations. shardwise annotates `shardwise::data`, `shardwise::forward`,
`shardwise::backward`, `shardwise::optimizer`, `shardwise::save` and `shardwise::validation`. FSDP2 names its gathers
and reductions, torch its optimizers and loaders, c10d its collectives. Without an annotation of the forward pass, as in
a trace from elsewhere, forward is what precedes the first operator of autograd's backward pass.

Each gap of the device has a cause, by what the host did before it launched what ran next:

- `waiting_for_data`: the host was in the phase `data`;
- `synchronising`: the host had waited for the device (cudaStreamSynchronize, `.item()` …), so that nothing was queued
  when the device had ended its work;
- `launching`: the host was busy otherwise: Python, torch's operators, the launch itself. The step is host-bound;
- `between_kernels`: what ran next had been launched before the gap began, or LAUNCH_TAKES before the gap ended: the
  device's own pause, a wait of one stream for another, or work that the trace does not have.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from shardwise_tools.traces.trace import (
    COMMUNICATION,
    COMPUTE,
    COPY,
    KINDS,
    UNKNOWN,
    Activity,
    DeviceEvents,
    HostEvents,
    Times,
    Trace,
    Union,
)

_COMPUTE = [KINDS.index(kind) for kind in COMPUTE]
_COMMUNICATION, _COPY = KINDS.index(COMMUNICATION), KINDS.index(COPY)


@dataclass(frozen=True)
class StepWindow:
    """A step of the device, in ns. The windows of consecutive steps touch or follow each other."""

    number: int
    begin: int
    end: int


@dataclass(frozen=True)
class StepWork:
    """Where one step went, in ns. compute + exposed_communication + copies_alone + idle is its span."""

    compute: int  # at least one kernel that computes was running
    exposed_communication: int  # a collective was running, and nothing computed
    copies_alone: int  # only the copy engines were at work
    idle: int  # nothing was running
    communication: int  # a collective was running, exposed or not
    kinds: dict[str, float]  # of each kind that computes; together they are `compute`


def step_windows(trace: Trace) -> list[StepWindow]:
    """The device works behind the host. Its step begins when the host has begun it and the work of earlier steps is
    done; it ends when the host has ended it and everything that was launched until then is done."""
    device, windows = trace.device, []
    earlier = device.end[device.launched < trace.steps[0].begin]
    done = int(earlier.max()) if len(earlier) and not trace.is_cpu else trace.steps[0].begin
    for step in trace.steps:
        begin = max(step.begin, done)
        launched = device.end[(device.launched >= step.begin) & (device.launched < step.end)]
        work = int(launched.max()) if len(launched) and not trace.is_cpu else step.end
        done = max(begin, step.end, work)
        windows.append(StepWindow(step.number, begin, done))
    return windows


def step_work(device: DeviceEvents, begin: int, end: int) -> StepWork:
    """What the device did in [begin, end)."""
    activity = Activity.of(device.begin, device.end, device.kind, len(KINDS), (begin, end))
    computes = np.asarray(activity.active[_COMPUTE].any(axis=0))
    communicates = np.asarray(activity.active[_COMMUNICATION] > 0)
    copies = np.asarray(activity.active[_COPY] > 0)
    shares = activity.shares(_COMPUTE)
    return StepWork(
        compute=activity.total(computes),
        exposed_communication=activity.total(communicates & ~computes),
        copies_alone=activity.total(copies & ~communicates & ~computes),
        idle=activity.total(~copies & ~communicates & ~computes),
        communication=activity.total(communicates),
        kinds={kind: float(share) for kind, share in zip(COMPUTE, shares, strict=True)},
    )


def busy(device: DeviceEvents) -> Union:
    """When anything ran."""
    return Union.of(device.begin, device.end)


def within(device: DeviceEvents, begin: int, end: int) -> DeviceEvents:
    """What ran in [begin, end), cut off at its bounds."""
    inside = device.where((device.end > begin) & (device.begin < end))
    return DeviceEvents(
        inside.name, np.maximum(inside.begin, begin), np.minimum(inside.end, end), inside.lane, inside.kind,
        inside.launched, inside.thread,
    )  # fmt: skip


PHASES = ("data", "forward", "backward", "gather", "reduce", "optimizer", "save", "validation")
# The first pattern that matches decides.
PATTERNS = (
    (re.compile(r"^shardwise::(data|forward|backward|optimizer|save|validation)\b"), None),
    (re.compile(r"^enumerate\(DataLoader\)|^DataLoader|next_batch|^## ?(data|fetch)", re.I), "data"),
    (re.compile(r"^FSDP::all_gather|^(nccl|gloo|xccl|c10d):+_?all_?gather", re.I), "gather"),
    (
        re.compile(r"^FSDP::post_backward_reduce|^(nccl|gloo|xccl|c10d):+_?(reduce_?scatter|all_?reduce)", re.I),
        "reduce",
    ),
    (re.compile(r"^Optimizer\.(step|zero_grad)#|^## ?optimizer", re.I), "optimizer"),
    (re.compile(r"^## ?forward|^DistributedDataParallel\.forward", re.I), "forward"),
    (re.compile(r"^## ?backward", re.I), "backward"),
)
GATHERS = re.compile(r"all_?gather", re.I)
REDUCES = re.compile(r"all_?reduce|reduce_?scatter|_reduce_", re.I)
OF_AUTOGRAD = "autograd::engine::evaluate_function"


@cache
def phase_of(name: str) -> str | None:
    """The phase that an annotation names."""
    for pattern, phase in PATTERNS:
        if match := pattern.match(name):
            return phase or match[1]
    return None


def host_phases(trace: Trace) -> dict[str, Union]:
    """When the host was in each phase; a phase that nothing names is missing."""
    found = {phase: _of_names(trace, trace.annotations, phase) for phase in PHASES}
    if not len(found["backward"].begin):
        of_autograd = np.array([name.startswith(OF_AUTOGRAD) for name in trace.names], dtype=bool)
        backward = trace.operations.where(of_autograd[trace.operations.name])
        found["backward"] = Union.of(backward.begin, backward.end)
    if not len(found["forward"].begin):
        found["forward"] = _before_backward(trace, found["backward"])
    return {phase: union for phase, union in found.items() if len(union.begin)}


def calls_of_phases(trace: Trace) -> dict[str, int]:
    """How many annotations name each phase; those that lie within another of the same phase are not counted."""
    return {phase: len(_of_names(trace, trace.annotations, phase).begin) for phase in PHASES}


def device_phases(trace: Trace, device: DeviceEvents, host: dict[str, Union]) -> NDArray[np.int64]:
    """For each event of the device the number of its phase in PHASES; -1: none.

    A collective belongs to the phase that its own name tells, everything else to the phase in which it was launched.
    """
    result = np.full(len(device), -1, dtype=np.int64)
    # A later one may lie within an earlier one
    for phase in ("validation", "forward", "backward", "data", "save", "optimizer"):
        if phase in host:
            result[host[phase].has(device.launched)] = PHASES.index(phase)
    for phase in ("gather", "reduce"):
        for thread in np.unique(device.thread):
            mine = trace.annotations.where(trace.annotations.thread == thread)
            inside = _of_names(trace, mine, phase).has(device.launched)
            result[inside & (device.thread == thread)] = PHASES.index(phase)
    is_collective = device.kind == KINDS.index(COMMUNICATION)
    for phase, pattern in (("gather", GATHERS), ("reduce", REDUCES)):
        named = np.array([bool(pattern.search(name)) for name in trace.names], dtype=bool)
        result[is_collective & named[device.name]] = PHASES.index(phase)
    return result


def _of_names(trace: Trace, events: HostEvents, phase: str) -> Union:
    named = np.array([phase_of(name) == phase for name in trace.names], dtype=bool)
    chosen = events.where(named[events.name])
    return Union.of(chosen.begin, chosen.end)


def _before_backward(trace: Trace, backward: Union) -> Union:
    """From each step's begin to the first backward of it."""
    begins: list[int] = []
    ends: list[int] = []
    for step in trace.steps:
        later: Times = backward.begin[(backward.begin >= step.begin) & (backward.begin < step.end)]
        if len(later):
            begins.append(step.begin)
            ends.append(int(later[0]))
    return Union.of(np.array(begins, dtype=np.int64), np.array(ends, dtype=np.int64))


CAUSES = ("waiting_for_data", "synchronising", "launching", "between_kernels")
# Calls in which the host waits for the device. Allocating and freeing device memory waits for it too.
SYNCHRONISES = re.compile(
    r"^(cuda|hip|cu)\w*Synchronize|^(cuda|hip)(Memcpy|Memset)(2D|3D)?$|^(cuda|hip)(Malloc|Free)(Host)?$|^cuMem(Alloc|Free)"
)
CLOCKS_DIFFER_BY = 5000  # ns: the device's clock is fitted to the host's
LAUNCH_TAKES = 20_000  # ns at most, from the call on the host to the kernel's begin on an idle device
MOST_NAMED = 300  # synchronisations whose Python line is looked for, the costliest first
NOT_THE_USERS = re.compile(
    r"^(torch|lightning|lightning_fabric|pytorch_lightning|deepspeed|contextlib\.py|<|nn\.Module: )"
)
OPERATOR_OF = {"aten::item": ".item()", "aten::_local_scalar_dense": ".item()", "aten::nonzero": "nonzero()"}


class IdleTime:
    """The idle time of a trace's steps by cause, and where in the code it came from."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.phases = host_phases(trace)
        self.busy = busy(trace.device)
        is_sync = np.array([bool(SYNCHRONISES.search(name)) for name in trace.names], dtype=bool)
        self.syncs = trace.launches.where(is_sync[trace.launches.name])
        self._of_sync: defaultdict[int, float] = defaultdict(float)  # row of syncs → ns
        self._of_phase: defaultdict[tuple[str, str], float] = defaultdict(float)  # cause and phase → ns

    def of(self, window: StepWindow) -> dict[str, int]:
        """ns of each cause in a step; together they are the step's idle time."""
        gaps = self.busy.gaps(window.begin, window.end)
        if not len(gaps.begin):
            return dict.fromkeys(CAUSES, 0)
        launched, thread = self._next_launches(gaps, window)
        was_queued = launched < gaps.begin
        queued = np.where(was_queued, gaps.end - gaps.begin, np.maximum(gaps.end - launched - LAUNCH_TAKES, 0))
        host_until = np.clip(launched, gaps.begin, gaps.end)
        data = self.phases["data"].overlap(gaps.begin, host_until) if "data" in self.phases else 0 * gaps.begin
        sync, row = self._synchronised(gaps, host_until, thread)
        sync = np.minimum(sync, gaps.end - gaps.begin - queued - data)
        launching = gaps.end - gaps.begin - queued - data - sync
        self._of_phase["waiting_for_data", "the loader"] += float(data.sum())
        self._add_by_phase("launching", launching, np.clip(launched, gaps.begin, gaps.end - 1))
        for at in np.flatnonzero(sync):
            self._of_sync[int(row[at])] += float(sync[at])
        parts = (data, sync, launching, queued)
        return {cause: int(part.sum()) for cause, part in zip(CAUSES, parts, strict=True)}

    def places(self, most: int = 10) -> list[tuple[str, str, float]]:
        """Cause, place and ns of the costliest places, over all steps that were asked for."""
        found: defaultdict[tuple[str, str], float] = defaultdict(float)
        by_cost = sorted(self._of_sync.items(), key=lambda item: -item[1])
        for number, (row, cost) in enumerate(by_cost):
            found["synchronising", self._name_sync(row, number < MOST_NAMED)] += cost
        for key, cost in self._of_phase.items():
            found[key] += cost
        ordered = sorted(found.items(), key=lambda item: -item[1])
        return [(cause, place, cost) for (cause, place), cost in ordered[:most] if cost > 0]

    def _next_launches(self, gaps: Union, window: StepWindow) -> tuple[Times, Times]:
        """When what ran after each gap was launched, and by which thread. After the last one the host went on until the
        step ended."""
        device = self.trace.device
        at = np.minimum(np.searchsorted(device.begin, gaps.end), len(device) - 1)
        launched, thread = device.launched[at], device.thread[at]
        is_last = gaps.end == window.end
        launched = np.where(is_last | (launched == UNKNOWN), gaps.end, launched)
        return launched, np.where(is_last, self.trace.main_thread, thread)

    def _synchronised(self, gaps: Union, host_until: Times, thread: Times) -> tuple[Times, Times]:
        """ns of each gap that a synchronisation cost, and which one it was.

        If the host was waiting when the device ran dry, the whole gap is the wait's: without it more would have been
        queued. A call that found the device idle costs its own time.
        """
        begin = gaps.begin
        cost, row = np.zeros(len(begin), dtype=np.int64), np.full(len(begin), -1)
        main = self.trace.main_thread
        for one in np.unique(self.syncs.thread):
            rows = np.flatnonzero(self.syncs.thread == one)
            first, last = self.syncs.begin[rows], self.syncs.end[rows]
            at = np.searchsorted(first, begin + CLOCKS_DIFFER_BY, side="right") - 1
            chosen = rows[np.maximum(at, 0)]
            was_waiting = (at >= 0) & (last[np.maximum(at, 0)] >= begin - CLOCKS_DIFFER_BY)
            own = Union.of(first, last).overlap(begin, host_until)
            at_end = np.searchsorted(first, host_until, side="left") - 1
            chosen = np.where(was_waiting, chosen, rows[np.maximum(at_end, 0)])
            this = np.where(was_waiting, gaps.end - begin, own)
            better = ((thread == one) | (one == main)) & (this > cost)
            cost, row = np.where(better, this, cost), np.where(better, chosen, row)
        return cost, row

    def _add_by_phase(self, cause: str, part: Times, moment: Times) -> None:
        left: NDArray[np.bool_] = part > 0
        for phase in ("optimizer", "save", "data", "backward", "forward", "validation"):
            if phase in self.phases:
                inside = left & self.phases[phase].has(moment)
                self._of_phase[cause, phase] += float(part[inside].sum())
                left = left & ~inside
        self._of_phase[cause, "between phases"] += float(part[left].sum())

    def _name_sync(self, row: int, look_for_line: bool) -> str:
        trace, sync = self.trace, self.syncs
        call = trace.names[sync.name[row]]
        operator = next(self._around(trace.operations, row), None)
        what = OPERATOR_OF.get(operator, operator) if operator else call
        line = self._line(row) if look_for_line else None
        if line is not None:
            return f"{what} in {line}"
        place = next((name for name in reversed([*self._around(trace.annotations, row)]) if "#" not in name), None)
        return f"{what} in {place}" if place else f"{what} ({call})" if what != call else call

    def _line(self, row: int) -> str | None:
        """The innermost function of the user's own code around it: `train.py(12): training_step`."""
        own = [frame for frame in self._around(self.trace.frames, row) if not NOT_THE_USERS.match(frame)]
        return own[-1] if own else None

    def _around(self, events: HostEvents, row: int) -> Iterator[str]:
        """Names of the events that contain a synchronisation, the outermost first."""
        begin, end, thread = self.syncs.begin[row], self.syncs.end[row], self.syncs.thread[row]
        first = np.searchsorted(events.begin, begin, side="right")
        inside = (events.end[:first] >= end) & (events.thread[:first] == thread)
        return (self.trace.names[events.name[at]] for at in np.flatnonzero(inside))
