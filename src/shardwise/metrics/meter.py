"""Measures how fast a run is: speed, waiting for data, MFU, memory, goodput. docs/metrics.md has the formulas."""

from __future__ import annotations

import csv
import gc
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from shardwise import accelerator
from shardwise.accelerator import has_streams
from shardwise.distributed.mesh import Mesh, gather_in_order
from shardwise.metrics.verdicts import (
    BUSY,
    COLLECTING,
    COLLECTIONS,
    COMPUTE,
    DEVICE_MEMORY,
    HOST_MEMORY,
    IDLE,
    RETRIES,
    SECONDS,
    WAITING,
)
from shardwise.plan import Plan
from shardwise.run_dir.files import (
    METRICS,
    RANKS,
    STARTS,
    keep_unless_goes_on,
    partial_path,
    put_aside,
    put_in_place,
    read_json,
    read_rows,
    write_whole,
)
from shardwise.step.record import HostSums, HostTimes, Readback, StepRecord

SPENT = "train/training_seconds"


@dataclass
class Sums:
    """Sums over some steps; loss weights and FLOPs are those of all ranks."""

    steps: int = 0
    seconds: float = 0.0
    waiting_seconds: float = 0.0  # the time in which this rank's device waited for data
    weight: float = 0.0
    flops: float = 0.0

    def add(self, other: Sums) -> None:
        self.steps += other.steps
        self.seconds += other.seconds
        self.waiting_seconds += other.waiting_seconds
        self.weight += other.weight
        self.flops += other.flops


class Meter:
    """Adds up the steps of this process, and knows what earlier processes of the run have spent."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.first = Sums()  # this process's first step, which compiles, allocates and connects
        self.rest = Sums()  # this process's other steps
        self.interval = Sums()  # the steps since the last row
        self.weight = 0.0  # of all steps of this process, profiled ones too
        self.profiled_steps: set[int] = set()  # steps that are profiled, and take longer for that
        self.spent_before = 0.0  # seconds of earlier processes' steps, up to the checkpoint that the run goes on from
        self.started = process_start()  # when the run's first process was started

    def on_start(self) -> None:
        """Read what earlier processes of the run have recorded, and record this start. Rank 0 calls this."""
        folder = Path(self.plan.run_dir)
        rows = [row for row in read_rows(folder / METRICS) if row.get(SPENT)]
        self.spent_before = float(rows[-1][SPENT]) if rows else 0.0
        starts = folder / STARTS
        try:
            times = read_json(starts) if starts.exists() else []
        except ValueError:
            kept = put_aside(starts)
            print(f"{starts} cannot be read: goodput counts from this start, and it is kept as {kept.name}", flush=True)
            times = []
        write_whole(starts, json.dumps([*times, self.started]) + "\n")
        self.started = min([*times, self.started])

    def add(self, step: StepRecord, weight: float, flops: float) -> None:
        """Add a step. `weight` and `flops` are those of all ranks."""
        self.weight += weight
        if step.number in self.profiled_steps:
            self.profiled_steps.remove(step.number)
            return
        # The device waits from the end of the last step until its batch arrives. It waits for data only as long as the
        # host did; for the rest of that time the host was behind.
        waiting = min(step.begin.until(step.arrived), step.fetching_seconds)
        sums = Sums(1, step.begin.until(step.end), waiting, weight, flops)
        (self.rest if self.first.steps else self.first).add(sums)
        self.interval.add(sums)

    def leave_out(self, steps: range) -> None:
        """Leave these steps out of every speed. They must not have been added yet."""
        self.profiled_steps.update(steps)

    def take_interval(self) -> Sums:
        """The steps that were added since the last call."""
        interval, self.interval = self.interval, Sums()
        return interval

    @property
    def steady(self) -> Sums:
        """This process's steps, without the first one if there are others."""
        return self.rest if self.rest.steps else self.first

    def mfu(self, sums: Sums) -> float | None:
        """Model FLOPs utilisation: the FLOPs that the model needs, over what the GPUs could have done in that time."""
        peak = self.plan.peak_tflops
        if not sums.flops or peak is None:
            return None
        return sums.flops / (sums.seconds * self.plan.topology.world_size * peak * 1e12)

    @property
    def training_seconds(self) -> float:
        """Seconds of steps whose work the run still has; a process's first step counts at most as much as another."""
        steady = self.steady
        first = steady.seconds / steady.steps if steady.steps else 0.0
        return self.spent_before + self.rest.seconds + min(first, self.first.seconds)

    @property
    def goodput(self) -> float:
        """The share of the time since the run's first start that became training steps."""
        return self.training_seconds / max(time.time() - self.started, 1e-9)


def process_start() -> float:
    """When this process was started, in seconds since 1970: a run's time includes its imports."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        return time.time()
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


# Gathers numbers of every rank at each logged row: how long it waited for data, its memory, what its GPU reports.

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


# What each rank tells of its own steps, garbage collections and memory at every row: what verdicts are made from.

# Means of a step since the last row:
#   SECONDS     between the ends of two steps, by the host's clock
#   BUSY        the host's own work, without waiting: see step/record.py
#   COMPUTE     a GPU's first forward pass; the computing of a process on the CPU
#   WAITING     CPU: the time in which the rank waited for the others
#   IDLE        GPU: the share of the steps at whose begin the device had nothing left to do
#   COLLECTING  in Python's garbage collector
# As it is at the row:
#   COLLECTIONS, RETRIES  how often garbage was collected, and the allocator had to give memory back first
#   HOST_MEMORY           of this process alone: what it shares with others, such as files, is left out
#   DEVICE_MEMORY         in tensors, between two steps
_OF_STEPS = (SECONDS, BUSY, COMPUTE, WAITING, IDLE, COLLECTING)
_OF_ALLOCATOR: dict[str, Shown] = {DEVICE_MEMORY: "not", RETRIES: "not"}
# The most memory since the process began: of tensors, and of all that the allocator holds
_PEAKS: dict[str, Shown] = {"train/memory_allocated_gib": "largest", "train/memory_reserved_gib": "largest"}


class HostTiming:
    """Registers this rank's numbers, and counts garbage collections from `begin` to `end`."""

    def __init__(self, kind: str, values: RankValues) -> None:
        self.garbage = GarbageClock()
        self._times: HostTimes | None = None
        self._device: torch.device | None = None
        values.add_source(dict.fromkeys(_OF_STEPS, "not"), self._of_steps)
        values.add_source({COLLECTIONS: "not", HOST_MEMORY: "not"}, self._of_process)
        if kind != "cpu":
            values.add_source(_PEAKS | _OF_ALLOCATOR, self._of_device)

    def begin(self, times: HostTimes, device: torch.device) -> None:
        self._times, self._device = times, device
        self.garbage.begin()

    def end(self) -> None:
        self.garbage.end()

    def _of_steps(self) -> Mapping[str, float]:
        if self._times is None:
            return {}
        sums = self._times.take()
        return of_steps(sums, self._times) | {COLLECTING: self.garbage.take() / max(sums.steps, 1)}

    def _of_process(self) -> Mapping[str, float]:
        memory = own_memory_gib()
        return {COLLECTIONS: self.garbage.count} | ({} if memory is None else {HOST_MEMORY: memory})

    def _of_device(self) -> Mapping[str, float]:
        if self._device is None:
            return {}
        counts = accelerator.memory_counts(self._device)
        in_gib = (counts.allocated_peak / 2**30, counts.reserved_peak / 2**30)
        return dict(zip(_PEAKS, in_gib, strict=True)) | {
            DEVICE_MEMORY: counts.allocated / 2**30,
            RETRIES: counts.retries,
        }


def of_steps(sums: HostSums, times: HostTimes) -> dict[str, float]:
    """The numbers that can be known on this device, under this strategy."""
    if not sums.steps:
        return {}
    values = {SECONDS: sums.seconds / sums.steps}
    if times.forward_is_alone if times.on_cpu else not times.waits_unseen:
        values[BUSY] = sums.busy_seconds / sums.steps
    if sums.compute_seconds:
        values[COMPUTE] = sums.compute_seconds / sums.steps
    if times.on_cpu:
        values[WAITING] = sums.waiting_seconds / sums.steps
    if sums.steps_asked:
        values[IDLE] = sums.steps_idle / sums.steps_asked
    return values


class GarbageClock:
    """Times Python's garbage collector in this process, without the time in which it waits for a core."""

    def __init__(self) -> None:
        self.count = 0
        self._seconds = self._began = 0.0

    def begin(self) -> None:
        if self._listen not in gc.callbacks:
            gc.callbacks.append(self._listen)

    def end(self) -> None:
        with suppress(ValueError):
            gc.callbacks.remove(self._listen)

    def take(self) -> float:
        """The seconds of collecting since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _listen(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self._seconds += time.thread_time() - self._began
            self.count += 1


def own_memory_gib() -> float | None:
    """The memory of this process in GiB, without what it shares with others; None where there is no /proc."""
    try:
        pages = Path("/proc/self/statm").read_text().split()
    except OSError:
        return None
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE") / 2**30
