"""Sorts what host and device did into the phases of a step, by the names of annotations.

shardwise annotates `shardwise::data`, `shardwise::forward`, `shardwise::backward`, `shardwise::optimizer`,
`shardwise::save` and `shardwise::validation`. FSDP2 names its gathers and reductions, torch its optimizers and loaders,
c10d its collectives. Without an annotation of the forward pass, as in a trace from elsewhere, forward is what precedes
the first operator of autograd's backward pass.
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np
from numpy.typing import NDArray

from shardwise.metrics.profile.intervals import Union
from shardwise.metrics.profile.kinds import COMMUNICATION, KINDS
from shardwise.metrics.profile.trace import DeviceEvents, HostEvents, Times, Trace

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
