"""Makes numbers fit a picture: fewer points, round ticks, short labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


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
