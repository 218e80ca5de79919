"""How fast a loader is over numbers of workers, and whether a model would wait for it: a table and a picture."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import count

_BAR = 30  # characters of the longest bar
_ALIKE = 0.95  # a setting with fewer workers is as good if it reaches this share of the best
_RESERVE = 1.5  # times what the model consumes, since a disk is not always as fast


@dataclass(frozen=True)
class Row:
    """What was measured with one number of workers, of all loaders together."""

    workers: int
    startup_seconds: float  # until the slowest loader had its first batch
    batches_per_second: float
    samples_per_second: float
    weights_per_second: float | None  # tokens, say; None: the module does not weigh its batches


@dataclass(frozen=True)
class Appetite:
    """What one device consumes."""

    samples_per_second: float
    device: str  # "H100", say
    devices: int  # of a node
    source: str  # where the number comes from, in words


def time_batches(batches: Iterable[Any], seconds: float, skip: int) -> tuple[int, float]:
    """Read for about `seconds`, over the end of an epoch too: (number of batches, seconds).

    The first `skip` are not counted: they lay ready. At least one batch is counted.
    """
    endless = _endless(batches)
    until = time.perf_counter() + seconds
    for _ in range(skip):
        next(endless)
        if time.perf_counter() > until:  # too slow for anything to have lain ready
            break
    begin, number = time.perf_counter(), 0
    while True:
        next(endless)
        number += 1
        if (passed := time.perf_counter() - begin) >= seconds:
            return number, passed


def _endless(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from batches


def best_row(rows: list[Row], appetite: Appetite | None, loaders: int) -> Row:
    """The row with the fewest workers among those that are about as good as the best.

    `loaders`: how many were read at the same time, one for each device. If it is known what these consume, more than
    that, with a reserve, makes a row no better. If not, the fastest is the best.
    """
    scores = [_score(row, appetite, loaders) for row in rows]
    good = [row for row, score in zip(rows, scores, strict=True) if score >= _ALIKE * max(scores)]
    return min(good, key=lambda row: row.workers)


def _score(row: Row, appetite: Appetite | None, loaders: int) -> float:
    if appetite is None:
        return row.samples_per_second
    share = row.samples_per_second / (loaders * appetite.samples_per_second)
    if row.workers == 0:  # the rank reads by itself, while its device waits
        return share / (1 + share)
    return min(1.0, share / _RESERVE)


def table(rows: list[Row], unit: str) -> str:
    """A line for each row, with a bar; `unit`: what `weights_per_second` counts."""
    weighed = rows[0].weights_per_second is not None
    head = ["workers", "samples/s", *([f"{unit}/s"] if weighed else []), "batches/s", "start-up s", ""]
    most = max(row.samples_per_second for row in rows)
    lines = [head]
    for row in rows:
        weights = [f"{row.weights_per_second:,.0f}"] if row.weights_per_second is not None else []
        bar = "█" * max(1, round(_BAR * row.samples_per_second / most))
        lines.append([f"{row.workers}", _digits(row.samples_per_second), *weights, _digits(row.batches_per_second),
                      f"{row.startup_seconds:.1f}", bar])  # fmt: skip
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join([*(cell.rjust(width) for cell, width in zip(line[:-1], widths, strict=False)), line[-1]]).rstrip()
        for line in lines
    )


def verdict(row: Row, appetite: Appetite | None, loaders: int) -> str:
    """Whether the model would wait for its data, in a sentence."""
    if appetite is None:
        return (
            "what the model eats is not known here: give cluster=dgx_h100 (or another of conf/cluster/, with the run's "
            "precision) or run=runs/<id>"
        )
    eaten = appetite.devices * appetite.samples_per_second
    times = row.samples_per_second / eaten
    feeds = int(row.samples_per_second / appetite.samples_per_second)
    devices = f"{appetite.devices} × {appetite.device}" if appetite.devices > 1 else f"one {appetite.device}"
    text = (
        f"with {count(row.workers, 'worker')} the data give {_digits(row.samples_per_second)} samples/s here, and "
        f"{devices} would eat {_digits(eaten)} ({appetite.source}): "
    )
    if times >= 1:
        text += f"the data are {times:,.1f} times as fast and can feed {feeds:,} of them, so the model does not wait"
    else:
        could = f"can feed {feeds:,} of them" if feeds else "cannot feed one of them"
        text += f"the data {could}, so the model would wait for {100 * (1 - times):.3g}% of the time"
    if row.workers == 0:
        share = 1 / (1 + row.samples_per_second / loaders / appetite.samples_per_second)
        text += f"; without workers reading takes {share:.1%} of each rank's time"
    if loaders < appetite.devices:
        text += f". {count(loaders, 'loader')} read here; devices={appetite.devices} reads as many as a node does"
    return text


def draw(rows: list[Row], appetite: Appetite | None, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.bar([f"{row.workers}" for row in rows], [row.samples_per_second for row in rows])
    if appetite is not None:
        eaten = appetite.devices * appetite.samples_per_second
        axes.axhline(eaten, linestyle="--", color="black", label=f"{appetite.devices} × {appetite.device}")
        axes.legend()
    axes.set_xlabel("data.num_workers")
    axes.set_ylabel("samples/s")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
