"""Gathers numbers of every rank at each logged row: how long it waited for data, its memory, what its GPU reports."""

from __future__ import annotations

import csv
import io
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from shardwise.accelerator import has_streams
from shardwise.distributed.collectives import gather_in_order
from shardwise.distributed.mesh import Mesh
from shardwise.run_dir.files import RANKS, partial_path, put_in_place
from shardwise.run_dir.rows import keep_unless_goes_on, read_rows
from shardwise.step.record import Readback

# How a number of every rank appears in a row of metrics.csv: as the largest of any rank, as mean, smallest and largest
# with the ranks that have these, or not at all
Shown = Literal["largest", "spread", "not"]
_MISSING = float("nan")  # stands for a number that a rank does not know
_LIMIT_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Source:
    """Where a rank's numbers come from."""

    names: dict[str, Shown]
    read: Callable[[], Mapping[str, float]]  # what has been measured since the last call; names may be missing


class RankValues:
    """The numbers that each rank reports, from any number of sources."""

    def __init__(self) -> None:
        self._sources: list[Source] = []

    def add_source(self, names: Mapping[str, Shown], read: Callable[[], Mapping[str, float]]) -> None:
        """Add numbers to each row. Every rank adds the same sources in the same order before training starts.

        `read` is called on every rank at each row, must not wait for the device, and may leave names out.
        """
        self._sources.append(Source(dict(names), read))

    @property
    def names(self) -> list[str]:
        return [name for source in self._sources for name in source.names]

    def gather(self, mesh: Mesh, device: torch.device) -> Gathered:
        """Read every source and send the numbers to all ranks. Collective; does not wait for the device."""
        own = [value for source in self._sources for value in _in_order(source)]
        values = torch.tensor(own, dtype=torch.float32)
        world = mesh.group("world")
        if world.size() > 1:
            values = (values.pin_memory() if has_streams(device) else values).to(device, non_blocking=True)
            values = gather_in_order(world, values)
        return Gathered(self, Readback(values))

    def row(self, values: dict[str, list[float]]) -> dict[str, float]:
        """The columns of metrics.csv that are made of `values`."""
        row: dict[str, float] = {}
        for source in self._sources:
            for name, shown in source.names.items():
                row |= columns(name, values[name], shown)
        return row


class Gathered:
    """The numbers of all ranks on their way from the device."""

    def __init__(self, of: RankValues, readback: Readback) -> None:
        self._names, self._readback = of.names, readback

    def read(self) -> dict[str, list[float]]:
        """Name → one number a rank; NaN where a rank does not know it. Waits if the device has not written them yet."""
        flat, count = self._readback.read(), len(self._names)
        return {name: flat[place::count] for place, name in enumerate(self._names)}


def columns(name: str, values: list[float], shown: Shown) -> dict[str, float]:
    """A number's columns in metrics.csv; none if no rank knows it."""
    known = {rank: value for rank, value in enumerate(values) if not math.isnan(value)}
    if shown == "not" or not known:
        return {}
    most, least = max(known, key=known.__getitem__), min(known, key=known.__getitem__)
    if shown == "largest":
        return {name: known[most]}
    mean = {name: math.fsum(known.values()) / len(known)}
    if len(values) == 1:
        return mean
    return mean | {
        f"{name}_min": known[least],
        f"{name}_min_rank": float(least),
        f"{name}_max": known[most],
        f"{name}_max_rank": float(most),
    }


class RanksCsv:
    """Writes `ranks.csv`: a row for each logged step and rank. Of a file that grows too large it keeps every second
    step, and from then on it writes half as often."""

    def __init__(self, run_dir: str | Path, limit: int = _LIMIT_BYTES) -> None:
        self.path, self._limit = Path(run_dir) / RANKS, limit
        self._fields: list[str] = []  # the columns of the file
        self._every = 1  # of so many rows, one is written
        self._offered = 0

    def rewind(self, step: int) -> None:
        """Remove the rows after `step`: a run that goes on from its checkpoint writes them again."""
        keep_unless_goes_on(self.path, step)
        rows = [row for row in read_rows(self.path) if int(row["step"]) <= step]
        if rows:
            self._write(list(rows[0]), rows)
        else:
            self.path.unlink(missing_ok=True)

    def append(self, step: int, values: dict[str, list[float]]) -> None:
        """Write a step's row of every rank, or say that it could not be. What a rank does not know is left empty."""
        try:
            self._append(step, values)
        except OSError as error:
            print(f"{self.path} lacks step {step}: it could not be written: {error.strerror}", file=sys.stderr)

    def _append(self, step: int, values: dict[str, list[float]]) -> None:
        self._offered += 1
        if (self._offered - 1) % self._every:
            return
        now = f"{time.time():.1f}"
        ranks = range(max(map(len, values.values()), default=0))
        rows = [
            {"step": step, "time": now, "rank": rank} | {name: _text(of[rank]) for name, of in values.items()}
            for rank in ranks
        ]
        names = ["step", "time", "rank", *values]
        if not set(names) <= set(self._fields):  # the first row, or a run that went on with other numbers
            earlier = read_rows(self.path)
            self._write(list(dict.fromkeys([*names, *(earlier[0] if earlier else ())])), earlier)
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._fields).writerows(rows)
        whole = self.path.stat().st_size
        try:
            with self.path.open("a", newline="") as file:
                file.write(text.getvalue())  # in one call, which a kill cannot cut in two
        except OSError:
            os.truncate(self.path, whole)  # a part of a row, which the next one would go on with
            raise
        if self.path.stat().st_size > self._limit:
            self._thin()

    def _thin(self) -> None:
        rows = read_rows(self.path)
        kept = set(list(dict.fromkeys(row["step"] for row in rows))[::2])
        self._write(self._fields, [row for row in rows if row["step"] in kept])
        self._every *= 2

    def _write(self, fields: list[str], rows: list[dict[str, str]]) -> None:
        with partial_path(self.path).open("w", newline="") as file:
            writer = csv.DictWriter(file, fields)
            writer.writeheader()
            writer.writerows(rows)
        put_in_place(self.path)
        self._fields = fields


def _in_order(source: Source) -> list[float]:
    values = source.read()
    return [float(values.get(name, _MISSING)) for name in source.names]


def _text(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}"
