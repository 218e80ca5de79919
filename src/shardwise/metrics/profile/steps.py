"""Where each step of the device begins and ends, and what it does in between."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.metrics.profile.intervals import Activity, Union
from shardwise.metrics.profile.kinds import COMMUNICATION, COMPUTE, COPY, KINDS
from shardwise.metrics.profile.trace import DeviceEvents, Trace

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
