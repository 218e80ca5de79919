"""Draws what every rank measured as a heat map: steps from left to right, a line of cells for each rank."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from html import escape

from shardwise.viewer.chart import BOTTOM, LEFT, TOP, figure, frame, x_of
from shardwise.viewer.scale import Axis, short

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
