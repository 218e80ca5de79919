"""Draws a summary: where the step goes, what ran when, and which kernels cost most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shardwise.metrics.profile.idle import CAUSES
from shardwise.metrics.profile.intervals import Union
from shardwise.metrics.profile.kinds import COMMUNICATION, COMPUTE, COPY, KINDS, OTHER, short_name
from shardwise.metrics.profile.phases import PHASES, host_phases
from shardwise.metrics.profile.steps import StepWindow, step_windows, within
from shardwise.metrics.profile.summary import ProfileSummary
from shardwise.metrics.profile.table import calls_of
from shardwise.metrics.profile.trace import DeviceEvents, Trace

# Colours that people with any colour vision tell apart, as far as eleven kinds allow
COLOURS = {
    "matmul": "#0072b2", "attention": "#56b4e9", "convolution": "#004c6d", "normalisation": "#009e73",
    "optimizer": "#8c6bb1", "copies and casts": "#a6a6a6", "elementwise": "#66c2a5", "reductions": "#1b7837",
    OTHER: "#4d4d4d", COMMUNICATION: "#d55e00", COPY: "#c9a227",
}  # fmt: skip
IDLE_COLOURS = dict(zip(CAUSES, ("#f7d5d5", "#e79ac0", "#f4e3a1", "#e8e8e8"), strict=True))
MOST_LANES = 6
SLICES = 2000  # of the timeline: what is shorter is drawn as what took most of its slice


def draw(summary: ProfileSummary, trace: Trace, path: str | Path) -> None:
    """Write a PNG of 1500 x 1000 pixels: the parts of the step, one step's timeline by phase and stream, the costliest
    kernels.

    Raises:
        OSError: it could not be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(15, 10), height_ratios=(1.5, 4, 4), layout="constrained")
    try:
        where = summary.device_name or ("CPU" if summary.is_cpu else "GPU")
        figure.suptitle(f"rank {summary.rank} on {where}: {summary.step.span_ms:.1f} ms a step", fontsize=14)
        _parts(axes[0], summary)
        _timeline(axes[1], trace)
        _kernels(axes[2], summary)
        figure.savefig(path, dpi=100)
    finally:
        plt.close(figure)


def _parts(axis: Any, summary: ProfileSummary) -> None:
    """One bar, whose parts add up to the step; the legend has their shares."""
    step = summary.step
    parts = [(kind, summary.kinds_ms[kind], COLOURS[kind]) for kind in COMPUTE if summary.kinds_ms.get(kind)]
    parts.append(("exposed communication", step.exposed_communication_ms, COLOURS[COMMUNICATION]))
    parts.append(("copies alone", step.copies_alone_ms, COLOURS[COPY]))
    parts += [
        (f"idle: {cause.replace('_', ' ')}", getattr(step, f"{cause}_ms"), IDLE_COLOURS[cause]) for cause in CAUSES
    ]
    left = 0.0
    for name, ms, colour in parts:
        if ms > 0:
            label = f"{name} {ms / step.span_ms:.1%}"
            axis.barh(0, ms, left=left, color=colour, label=label, edgecolor="white", linewidth=0.5)
            left += ms
    axis.set(xlim=(0, step.span_ms), yticks=[], xlabel="ms of a step", title="where the step goes")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.42), ncols=5, frameon=False, fontsize=10)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _timeline(axis: Any, trace: Trace) -> None:
    """The last profiled step: phases of the host above, below them a row for each stream."""
    window = step_windows(trace)[-1]
    device = within(trace.device, window.begin, window.end)
    lanes = _busiest_lanes(device)
    phases = {name: union for name, union in host_phases(trace).items() if union.overlap(*_bounds(window))[0]}
    rows = [
        *(f"host: {name}" for name in PHASES if name in phases),
        *(_lane_name(trace, device, lane) for lane in lanes),
    ]
    for row, union in enumerate(phases[name] for name in PHASES if name in phases):
        _bars(axis, row, union.clipped(window.begin, window.end), window, "#7f7f7f")
    for row, lane in enumerate(lanes, len(phases)):
        mine = device.where(device.lane == lane)
        for number, kind in enumerate(KINDS):
            _bars(axis, row, _slices(mine, number, window), window, COLOURS[kind])
    axis.set_yticks(range(len(rows)), rows)
    axis.set(
        ylim=(len(rows) - 0.5, -0.5), xlim=(0, (window.end - window.begin) / 1e6), xlabel="ms",
        title=f"step {window.number}: phases of the host, and what each {'thread' if trace.is_cpu else 'stream'} ran",
    )  # fmt: skip
    axis.spines[["top", "right"]].set_visible(False)


def _bounds(window: StepWindow) -> tuple[Any, Any]:
    return np.array([window.begin]), np.array([window.end])


def _busiest_lanes(device: DeviceEvents) -> list[int]:
    lanes, row = np.unique(device.lane, return_inverse=True)
    work = np.bincount(row, weights=device.end - device.begin, minlength=len(lanes))
    return [int(lane) for lane in sorted(lanes[np.argsort(-work)[:MOST_LANES]])]


def _lane_name(trace: Trace, device: DeviceEvents, lane: int) -> str:
    communicates = (device.kind[device.lane == lane] == KINDS.index(COMMUNICATION)).mean() > 0.5
    word = "thread" if trace.is_cpu else "stream"
    return f"{word} {lane}" + (" (communication)" if communicates else "")


def _slices(device: DeviceEvents, kind: int, window: StepWindow) -> Union:
    """When events of a kind ran, with pauses that are too short to be seen filled."""
    mine = device.where(device.kind == kind)
    shortest = (window.end - window.begin) // SLICES
    return Union.of(mine.begin, np.maximum(mine.end, mine.begin + shortest))


def _bars(axis: Any, row: int, union: Union, window: StepWindow, colour: str) -> None:
    if len(union.begin):
        begins, lengths = (union.begin - window.begin) / 1e6, (union.end - union.begin) / 1e6
        axis.broken_barh(list(zip(begins, lengths, strict=True)), (row - 0.38, 0.76), facecolors=colour)


def _kernels(axis: Any, summary: ProfileSummary) -> None:
    """The costliest kernels, their names right of the bars."""
    kernels = list(summary.kernels)
    longest = max((kernel.total_ms for kernel in kernels), default=1.0)
    for row, kernel in enumerate(kernels):
        axis.barh(row, kernel.total_ms, color=COLOURS[kernel.kind])
        text = (
            f"{short_name(kernel.name, 80)}   {kernel.total_ms:.2f} ms, {calls_of(kernel.calls)} x "
            f"{kernel.mean_us:,.1f} µs"
        )
        axis.text(kernel.total_ms + longest * 0.008, row, text.replace("$", r"\$"), va="center", fontsize=9)
    names = [kernel.kind for kernel in kernels]
    axis.set_yticks(range(len(names)), names)
    title = "costliest operators" if summary.is_cpu else "costliest kernels"
    axis.set(ylim=(len(names) - 0.4, -0.6), xlim=(0, longest * 2), xlabel="ms of a step", title=title)
    axis.spines[["top", "right"]].set_visible(False)
