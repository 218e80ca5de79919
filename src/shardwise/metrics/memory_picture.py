"""Draws what holds memory: bytes by category over time, and the largest blocks at the peak. No web page is needed."""

from __future__ import annotations

from pathlib import Path

from shardwise.metrics.memory_profile import CATEGORIES, MemorySummary

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
