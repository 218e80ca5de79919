"""Shows a summary as a table and as a picture; and, as a picture, what holds memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.metrics.memory_profile import CATEGORIES, MemorySummary
from shardwise_tools.traces.steps import CAUSES, PHASES, StepWindow, host_phases, step_windows, within
from shardwise_tools.traces.summary import ProfileSummary
from shardwise_tools.traces.trace import (
    COMMUNICATION,
    COMPUTE,
    COPY,
    KINDS,
    OTHER,
    DeviceEvents,
    Trace,
    Union,
    short_name,
)

BAR = 30  # letters that stand for the whole step


def table(summary: ProfileSummary) -> str:
    """Several small tables, one below the other, at most 110 letters wide."""
    sections = [
        _head(summary), _part_lines(summary), _kinds(summary), _idle(summary), _kernel_lines(summary), _phases(summary),
        [f"note: {note}" for note in summary.notes],
    ]  # fmt: skip
    return "\n\n".join("\n".join(lines) for section in sections if (lines := list(section))) + "\n"


def _head(summary: ProfileSummary) -> Iterator[str]:
    steps = summary.steps
    numbers = f"step {steps[0].number}" if len(steps) == 1 else f"steps {steps[0].number} to {steps[-1].number}"
    where = ", ".join(filter(None, (summary.device_name or ("CPU" if summary.is_cpu else ""), summary.host_name)))
    yield f"{numbers} of rank {summary.rank}{f' ({where})' if where else ''}: {summary.step.span_ms:.1f} ms a step"
    if len(steps) > 1:
        spans = [f"{step.span_ms:.1f}" for step in steps]
        yield f"each step: {', '.join(spans[:12])}{' …' if len(spans) > 12 else ''} ms"


def _part_lines(summary: ProfileSummary) -> Iterator[str]:
    step = summary.step
    rows = [
        ("compute", step.compute_ms), ("exposed communication", step.exposed_communication_ms),
        ("copies alone", step.copies_alone_ms), ("idle", step.idle_ms),
    ]  # fmt: skip
    yield from _shares("where the step goes", rows, step.span_ms)
    if step.communication_ms:
        hidden = 1 - step.exposed_communication_ms / step.communication_ms
        yield f"  (communication in all: {step.communication_ms:.2f} ms, {hidden:.0%} of it beside compute)"


def _kinds(summary: ProfileSummary) -> Iterator[str]:
    rows = sorted(((kind, ms) for kind, ms in summary.kinds_ms.items() if ms > 0), key=lambda row: -row[1])
    return _shares("compute by kind of kernel", rows, summary.step.span_ms)


def _idle(summary: ProfileSummary) -> Iterator[str]:
    rows = [(cause.replace("_", " "), getattr(summary.step, f"{cause}_ms")) for cause in CAUSES]
    yield from _shares("idle, by what the host did", rows, summary.step.span_ms)
    for place in summary.idle_places[:6]:
        yield f"  {place.ms:9.2f} ms  {place.cause.replace('_', ' ')}: {_cut(place.place, 70)}"


def _shares(title: str, rows: Iterable[tuple[str, float]], whole: float) -> Iterator[str]:
    rows = list(rows)
    if rows:
        yield f"{title:32}{'ms':>10}{'share':>9}"
    for name, ms in rows:
        share = ms / whole if whole else 0.0
        yield f"  {name:30}{ms:10.2f}{share:9.1%}  {'#' * round(BAR * share)}".rstrip()


def _kernel_lines(summary: ProfileSummary) -> Iterator[str]:
    if summary.kernels:
        title = "costliest operators" if summary.is_cpu else "costliest kernels"
        yield f"{title:20}{'ms':>9}{'calls':>8}{'mean µs':>10}"
    for kernel in summary.kernels:
        figures = f"{kernel.total_ms:9.2f}{calls_of(kernel.calls):>8}{kernel.mean_us:10.1f}"
        yield f"  {kernel.kind:18}{figures}  {short_name(kernel.name)}"


def _phases(summary: ProfileSummary) -> Iterator[str]:
    if summary.phases:
        yield f"{'phases (they overlap)':32}{'host ms':>10}{'device ms':>11}{'calls':>8}"
    for phase in summary.phases:
        yield f"  {phase.name:30}{phase.host_ms:10.2f}{phase.device_ms:11.2f}{calls_of(phase.calls):>8}"


def calls_of(calls: float) -> str:
    """How often in a step: a whole number, or one that several steps have as their mean."""
    return f"{calls:,.0f}" if calls == round(calls) else f"{calls:,.1f}"


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else "…" + text[1 - longest :]


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


_COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#999999")


def draw_memory(summary: MemorySummary, path: str | Path) -> None:
    """Write a PNG. Raises OSError: it could not be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyplot is not safe in a thread
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7))
    FigureCanvasAgg(figure)
    axes, text = figure.subplots(2, 1, gridspec_kw={"height_ratios": [3, 1.4]})
    shown = [name for name in CATEGORIES if any(summary.curves[name])]
    times = [time / 1e3 for time in summary.times_us]
    if len(times) == 1:  # no history: what is held now
        times = [0.0, 1.0]
    curves = [[size / 2**30 for size in summary.curves[name]] for name in shown]
    curves = [curve if len(curve) > 1 else curve * 2 for curve in curves]
    if shown:
        colors = [_COLORS[CATEGORIES.index(name)] for name in shown]
        axes.stackplot(times, curves, labels=shown, colors=colors, step="post")
        axes.legend(loc="upper left", fontsize=8)
    axes.set(xlabel="ms", ylabel="GiB held by tensors", title=summary.text.splitlines()[0])
    axes.margins(x=0)
    text.axis("off")
    lines = [line if len(line) <= 120 else f"{line[:60]}…{line[-59:]}" for line in summary.text.splitlines()[1:]]
    text.text(0, 1, "\n".join(["the largest blocks at the peak", *lines]), va="top", family="monospace", fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
