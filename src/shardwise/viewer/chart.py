"""Draws curves over the steps of a run as SVG, with its restarts, saves and verdicts as marks.

The SVG is written by hand: a run's end does not wait for a plotting library to be imported, the same run gives the same
bytes with any version of it, and the page's style sheet colours light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from shardwise.viewer.follow import Series
from shardwise.viewer.scale import Axis, make_axis, means, short, thin

WIDTH, HEIGHT = 720, 250
LEFT, RIGHT, TOP, BOTTOM = 98, 10, 14, 34  # margins
COLUMNS = WIDTH - LEFT - RIGHT
_PARTS = 120  # of a long curve: the mean of each is drawn over the curve's noise
COLORS = 8  # of curves: the classes c0, c1, … of the page's style sheet


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step."""

    kind: str  # "restart", "save" or "verdict"
    step: int
    text: str


@dataclass(frozen=True)
class Curve:
    """A line of a chart."""

    name: str
    series: Series
    low: Series | None = None  # with `high`: a band around the line, such as the smallest and largest of all ranks
    high: Series | None = None
    has_points: bool = False  # whether each number is a dot: there are few, such as validations


def draw(title: str, curves: Sequence[Curve], x: Axis, marks: Sequence[Mark] = (), columns: int = COLUMNS) -> str:
    """A `<figure>` of these curves; empty if none of them has a number. A curve without numbers keeps its colour.

    `x`: the steps of the whole run. `columns`: for so many the curves are thinned.
    """
    numbered = [(n % COLORS, one) for n, one in enumerate(curves) if any(map(math.isfinite, one.series.values))]
    if not numbered:
        return ""
    shown = [value for _, curve in numbered for part in parts_of(curve) for value in part.values]
    y = make_axis(shown)
    body = [frame(x, y), *_marks(x, marks)]
    for color, curve in numbered:
        body.append(f'<g class="c{color}">{_curve(curve, x, y, columns)}</g>')
    legend = "".join(
        f'<span class="key c{color}">{escape(curve.name)} <b>{short(curve.series.values[-1])}</b></span>'
        for color, curve in numbered
    )
    log = '<span class="note">logarithmic</span>' if y.is_log else ""
    return figure(title, legend + log, "".join(body), HEIGHT)


def figure(title: str, legend: str, body: str, height: int) -> str:
    """A `<figure>` with its caption. `legend` and `body` are HTML and SVG."""
    return (
        f'<figure><figcaption><h3>{escape(title)}</h3><p class="keys">{legend}</p></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{body}</svg></figure>\n'
    )


def frame(x: Axis, y: Axis | None, height: int = HEIGHT) -> str:
    """The grid and its labels. Without `y` there are only the steps."""
    lines, labels = [], []
    bottom = height - BOTTOM
    for value in x.ticks:
        place = x_of(x, value)
        lines.append(f"M{place:.1f} {TOP}V{bottom}")
        anchor = "end" if place > WIDTH - 40 else "middle"
        labels.append(f'<text x="{place:.1f}" y="{height - 10}" text-anchor="{anchor}">{short(value)}</text>')
    for value in y.ticks if y is not None else ():
        place = y_of(y, value)  # type: ignore[arg-type]
        lines.append(f"M{LEFT} {place:.1f}H{WIDTH - RIGHT}")
        labels.append(f'<text x="{LEFT - 8}" y="{place + 5:.1f}" text-anchor="end">{short(value)}</text>')
    labels.append(f'<text x="{LEFT - 8}" y="{height - 10}" text-anchor="end">step</text>')
    return f'<path class="grid" d="{"".join(lines)}"/>{"".join(labels)}'


def x_of(x: Axis, step: float) -> float:
    return LEFT + x.share(step) * COLUMNS


def y_of(y: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - y.share(value) * (HEIGHT - BOTTOM - TOP)


def parts_of(curve: Curve) -> Iterable[Series]:
    return (part for part in (curve.series, curve.low, curve.high) if part is not None)


def _curve(curve: Curve, x: Axis, y: Axis, columns: int) -> str:
    points = [(x_of(x, step), y_of(y, value)) for step, value in _thin(curve.series, columns)]
    svg = ""
    if curve.low is not None and curve.high is not None:
        low, high = (
            [(x_of(x, step), y_of(y, value)) for step, value in _thin(s, columns // 2)] for s in (curve.low, curve.high)
        )
        svg += f'<path class="band" transform="scale(.1)" d="{_path([*high, *reversed(low)])}z"/>'
    if curve.has_points or len(points) == 1:
        svg += "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5"/>' for a, b in points[:200])
    is_dense = len(curve.series.steps) > 2 * columns
    kind = "line noise" if is_dense else "line"
    svg += f'<path class="{kind}" transform="scale(.1)" d="{_path(points)}"/>'
    if is_dense:
        middle = means(curve.series.steps, curve.series.values, _PARTS)
        svg += f'<path class="line" transform="scale(.1)" d="{_path([(x_of(x, a), y_of(y, b)) for a, b in middle])}"/>'
    broken = [s for s, value in zip(curve.series.steps, curve.series.values, strict=True) if not math.isfinite(value)]
    for place in sorted({round(x_of(x, step)) for step in broken}):  # not a number: a cross at the top
        svg += f'<path class="broken" d="M{place - 4} {TOP}l8 8m0-8l-8 8"><title>not a finite number</title></path>'
    return svg


def _thin(series: Series, columns: int) -> list[tuple[float, float]]:
    return thin(series.steps, series.values, columns)


def _path(points: Sequence[tuple[float, float]]) -> str:
    """A path through these points, in tenths of a unit: each as its distance from the one before."""
    words: list[str] = []
    before = (0, 0)
    for a, b in points:
        here = (round(a * 10), round(b * 10))
        x, y = here[0] - before[0], here[1] - before[1]
        if not words:
            words.append(f"M{x} {y}l")
        elif (x, y) != (0, 0):
            words.append(f"{x}{y}" if y < 0 else f"{x} {y}")
        before = here
    return words[0] + " ".join(words[1:]) if len(words) > 1 else "".join(words).rstrip("l")


def _marks(x: Axis, marks: Sequence[Mark]) -> Iterable[str]:
    seen: set[tuple[str, int]] = set()
    for mark in marks:
        place = round(x_of(x, mark.step))
        if (mark.kind, place) in seen or not x.low <= mark.step <= x.high:
            continue
        seen.add((mark.kind, place))
        title = f"<title>step {mark.step}: {escape(mark.text)}</title>"
        if mark.kind == "save":
            yield f'<path class="save" d="M{place} {HEIGHT - BOTTOM}v-9">{title}</path>'
        elif mark.kind == "restart":
            yield f'<path class="restart" d="M{place} {TOP}V{HEIGHT - BOTTOM}">{title}</path>'
        else:
            yield f'<path class="verdict" d="M{place - 5} {TOP - 9}h10l-5 9z">{title}</path>'


def series_of(points: Iterable[tuple[int, float]]) -> Series:
    series = Series()
    for step, value in points:
        series.add(step, value)
    return series


def range_of_steps(found: Iterable[Series], steps: int = 0) -> Axis:
    """The axis of all these columns' steps, and of a run that has made so many."""
    ends = [end for series in found if series.steps for end in (min(series.steps), max(series.steps))]
    return make_axis([*ends, *([steps] if steps else [])] or [0, 1], is_steps=True)
