"""Draws the columns of a run's files as SVG: curves over its steps, with its restarts, saves and verdicts as marks, and
heat maps of what every rank measured.

The SVG is written by hand: a run's end does not wait for a plotting library to be imported, the same run gives the same
bytes with any version of it, and the page's style sheet colours light and dark.
"""

from __future__ import annotations

import base64
import math
import re
import struct
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from shardwise_tools.viewer.record import Series


def thin(steps: Sequence[float], values: Sequence[float], columns: int) -> list[tuple[float, float]]:
    """The points of a curve for a picture of so many pixel columns: of each column the lowest and the highest.

    Every spike stays, in a mean it would vanish. Values that are not finite are left out. `steps` may fall back where
    a run was rolled back: the points are sorted.
    """
    points = finite_points(steps, values)
    if len(points) <= 2 * columns:
        return points
    first, last = points[0][0], points[-1][0]
    factor = columns / ((last - first) or 1)
    kept = [points[0]]
    column, low, high = -1, points[0], points[0]
    for point in points:
        here = int((point[0] - first) * factor)
        if here != column:
            _keep(kept, low, high)
            column, low, high = here, point, point
        elif point[1] < low[1]:
            low = point
        elif point[1] > high[1]:
            high = point
    _keep(kept, low, high)
    _keep(kept, points[-1], points[-1])
    return kept


def finite_points(steps: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """The points in the order of their steps, without those that are not finite."""
    points = [point for point in zip(steps, values, strict=True) if math.isfinite(point[1])]
    points.sort(key=lambda point: point[0])
    return points


def means(steps: Sequence[float], values: Sequence[float], parts: int) -> list[tuple[float, float]]:
    """The mean of each of so many stretches of a curve: where it goes, behind its noise."""
    points = finite_points(steps, values)
    if not points:
        return []
    first, last = points[0][0], points[-1][0]
    factor = parts / ((last - first) or 1)
    sums: dict[int, list[float]] = {}
    for step, value in points:
        found = sums.setdefault(min(parts - 1, int((step - first) * factor)), [0.0, 0.0, 0.0])
        found[0] += step
        found[1] += value
        found[2] += 1
    return [(step / number, value / number) for step, value, number in sums.values()]


def _keep(kept: list[tuple[float, float]], low: tuple[float, float], high: tuple[float, float]) -> None:
    """Append a column's two points in their order; a point that is there already is not repeated."""
    for point in sorted({low, high}):
        if point > kept[-1]:
            kept.append(point)


@dataclass(frozen=True)
class Axis:
    """A range of numbers with its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Where a value is, from 0 to 1."""
        if self.is_log:
            value, low, high = math.log10(max(value, 1e-300)), math.log10(self.low), math.log10(self.high)
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / ((high - low) or 1)))


def make_axis(values: Sequence[float], *, is_steps: bool = False, may_be_log: bool = True) -> Axis:
    """An axis that holds all finite `values`. It is logarithmic where a few values are far above the others."""
    finite = sorted([value for value in values if math.isfinite(value)])
    if not finite:
        return Axis(0.0, 1.0, (0.0, 1.0))
    low, high = finite[0], finite[-1]
    if is_steps:
        return Axis(low, max(high, low + 1), ticks(low, max(high, low + 1), 5))
    if may_be_log and low > 0 and high > 100 * finite[len(finite) // 2]:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        every = max(1, (last - first) // 5)
        return Axis(10.0**first, 10.0**last, tuple(10.0**n for n in range(first, last + 1, every)), is_log=True)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    bottom, top = low - room, high + room
    if low >= 0 and low < 0.4 * high:
        bottom = 0.0
    return Axis(bottom, top, ticks(bottom, top, 5))


def ticks(low: float, high: float, about: int) -> tuple[float, ...]:
    """Round numbers from `low` to `high`, about so many."""
    size = (high - low) / about
    power = 10.0 ** math.floor(math.log10(size))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= size * 0.999)
    first = math.ceil(low / step - 1e-9)
    found: list[float] = []
    while (first + len(found)) * step <= high * (1 + 1e-12 * (high > 0)) + 1e-12 * step:
        found.append((first + len(found)) * step)
    return tuple(round(value, 12) + 0.0 for value in found)


def short(value: float) -> str:
    """A number in a few characters: `1,234`, `120k`, `3.4M`, `0.00012`, `1e-7`."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e5, "k")):
        if size >= limit:
            factor = 1e3 if unit == "k" else limit
            return f"{value / factor:.3g}{unit}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if size >= 1e-4 or size == 0 else f"{value:.2e}".replace("e-0", "e-")


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


BINS = 320  # columns of cells
_SHADES = 63  # a picture of few colours is small
# From low to high: dark blue, green, yellow (viridis), also for the colour-blind
_ANCHORS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


def draw_heat(title: str, values: Sequence[tuple[int, int, float]], ranks: int, x: Axis, most: int = BINS) -> str:
    """A `<figure>` of one number of all ranks. `values`: (step, rank, value). `most`: columns of cells.

    A cell of several rows has the value that is farthest from the mean of all, so that a short fault stays visible.
    """
    finite = [entry for entry in values if math.isfinite(entry[2])]
    if not finite:
        return ""
    numbers = sorted(value for _, _, value in finite)
    mean = sum(numbers) / len(numbers)
    bins = min(most, len({step for step, _, _ in finite}))
    first, last = min(finite)[0], max(finite)[0]
    cells: dict[tuple[int, int], float] = {}
    factor = bins / ((last - first) or 1)
    for step, rank, value in finite:
        place = (min(bins - 1, int((step - first) * factor)), rank)
        before = cells.get(place)
        if before is None or abs(value - mean) > abs(before - mean):
            cells[place] = value
    # One value far away would leave all others one colour
    low, high = numbers[len(numbers) // 100], numbers[-1 - len(numbers) // 100]
    rows = [bytearray(bins) for _ in range(ranks)]
    for (column, rank), value in sorted(cells.items()):
        share = (value - low) / (high - low) if high > low else 0.5
        rows[rank][column] = 1 + round(min(1.0, max(0.0, share)) * (_SHADES - 1))
    _fill_gaps(rows)
    height = max(40, min(240, ranks * 16))
    left, right = x_of(x, first), x_of(x, last)
    picture = (
        f'<image x="{left:.1f}" y="{TOP}" width="{max(4.0, right - left):.1f}" height="{height}" '
        f'preserveAspectRatio="none" href="data:image/png;base64,{_png(rows)}"/>'
    )
    every = max(1, -(-ranks // (height // 15)))
    labels = "".join(
        f'<text x="{LEFT - 8}" y="{TOP + (rank + 0.5) * height / ranks + 5:.1f}" text-anchor="end">{rank}</text>'
        for rank in range(0, ranks, every)
    )
    scale = bytearray(range(1, _SHADES + 1))
    legend = (
        f'<span class="key">{short(low)} <img class="scale" alt="from low to high" '
        f'src="data:image/png;base64,{_png([scale])}"> {short(high)}</span>'
    )
    if numbers[0] < low or numbers[-1] > high:
        legend += f'<span class="note">{escape(f"all values: {short(numbers[0])} to {short(numbers[-1])}")}</span>'
    total = TOP + height + BOTTOM
    return figure(f"{title}, by rank", legend, frame(x, None, total) + labels + picture, total)


def _fill_gaps(rows: Sequence[bytearray]) -> None:
    """A cell between two steps gets the value before it: rows are not spaced evenly. Longer gaps stay empty."""
    for row in rows:
        known = bytes(row)
        for column in range(1, len(row)):
            if not row[column] and known[column - 1]:
                row[column] = known[column - 1]


def _png(rows: Sequence[bytearray]) -> str:
    """A picture with a byte a cell, in base64: 0 is transparent, 1 to 63 are the shades."""
    palette = b"\0\0\0" + b"".join(bytes(_shade(number / (_SHADES - 1))) for number in range(_SHADES))
    pixels = b"".join(b"\0" + bytes(row) for row in rows)
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)
    chunks = (
        (b"IHDR", header),
        (b"PLTE", palette),
        (b"tRNS", b"\0"),
        (b"IDAT", zlib.compress(pixels, 9)),
        (b"IEND", b""),
    )
    png = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)
    return base64.b64encode(png).decode()


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _shade(share: float) -> tuple[int, int, int]:
    place = share * (len(_ANCHORS) - 1)
    number = min(int(place), len(_ANCHORS) - 2)
    low, high = _ANCHORS[number], _ANCHORS[number + 1]
    red, green, blue = (round(a + (b - a) * (place - number)) for a, b in zip(low, high, strict=True))
    return red, green, blue


LOSSES = ("train/global_batch_loss", "train/loss")  # the first of them that is there is that of the global batch
_SPREAD = ("_min", "_max", "_min_rank", "_max_rank")
# Positions and sums, which only grow
_HIDDEN = {"epoch", "train/samples", "train/training_seconds"}
_SHARES = ("train/mfu", "train/data_wait", "train/goodput")


@dataclass(frozen=True)
class Chart:
    """What one picture shows."""

    section: str
    title: str
    curves: tuple[Curve, ...]


def words(name: str) -> str:
    """A column's name in words: `train/step_seconds` → step seconds."""
    text = re.sub(r"^(train|shardwise)/", "", name).replace("data_wait", "waiting for data")
    text = text.replace("/", " ").replace("_per_second", "/s").replace("_", " ")
    return re.sub(r"\b(mfu|gpu|sm|ecc|gib)\b", lambda found: found[0].upper().replace("GIB", "GiB"), text)


def charts_of(series: Mapping[str, Series]) -> list[Chart]:
    """The charts of a run, in the order of the page's sections."""
    left = {name: found for name, found in series.items() if name not in _HIDDEN and not is_spread(name, series)}

    def take(*names: str) -> dict[str, Series]:
        return {name: left.pop(name) for name in names if name in left}

    def each(section: str, names: Iterable[str]) -> list[Chart]:
        return [Chart(section, words(name), (_curve_of(name, left.pop(name), series),)) for name in list(names)]

    def together(section: str, title: str, names: Sequence[str]) -> list[Chart]:
        found = take(*names)
        return [Chart(section, title, tuple(_curve_of(name, one, series) for name, one in found.items()))] * bool(found)

    losses = [loss_name(series), *(name for name in left if re.fullmatch(r"(validation|val)[/_](.+/)?loss", name))]
    charts = together("Loss", "loss", losses)
    charts += each("Loss", [name for name in left if "loss" in name and name != "train/loss_scale"])
    charts += each("Loss", [name for name in left if name.startswith(("validation/", "val_"))])
    charts += each("Loss", [name for name in ("train/gradient_norm", "train/learning_rate") if name in left])
    rates = [name for name in left if is_speed(name)]
    charts += each("Speed", rates[-1:])
    take(*rates)  # the others are multiples of it
    charts += each("Speed", [name for name in ("train/step_seconds",) if name in left])
    charts += together("Speed", ", ".join(words(name) for name in _SHARES if name in left), _SHARES)
    telemetry = [name for name in left if is_telemetry(name, series)]
    of_training = [name for name in left if name not in telemetry]
    charts += together("Memory", "memory, GiB", [n for n in of_training if re.search(r"memory_\w+_gib$", n)])
    charts += each("Memory", [name for name in of_training if name in left and re.search("memory|alloc", name)])
    charts += each("Telemetry", telemetry)
    return charts + each("Other values", left)


def is_speed(name: str) -> bool:
    """Whether a column says how fast the run trains, such as `train/tokens_per_second`."""
    return name.endswith("_per_second") and name.startswith(("train/", "shardwise/"))


def is_telemetry(name: str, series: Collection[str]) -> bool:
    """Whether a column is what GPUs or hosts report."""
    return name.startswith(("gpu/", "host/")) or f"{name}_max" in series


def loss_name(series: Mapping[str, Series]) -> str:
    """The column of the loss over the global batch."""
    return next((name for name in LOSSES if name in series), LOSSES[-1])


def is_spread(name: str, series: Collection[str]) -> bool:
    """Whether a column is the smallest or largest of all ranks, or its rank, beside the column of the mean."""
    return any(name.endswith(end) and name.removesuffix(end) in series for end in _SPREAD)


def _curve_of(name: str, found: Series, series: Mapping[str, Series]) -> Curve:
    is_few = name.startswith(("validation", "val_")) and len(found.steps) <= 200
    return Curve(words(name), found, series.get(f"{name}_min"), series.get(f"{name}_max"), is_few)
