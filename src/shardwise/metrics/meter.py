"""Measures how fast a run is: speed, waiting for data, MFU, memory, goodput. docs/metrics.md has the formulas."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from shardwise.plan import Plan
from shardwise.run_dir.files import METRICS, STARTS, put_aside, write_whole
from shardwise.run_dir.reading import read_json
from shardwise.run_dir.rows import read_rows
from shardwise.step.record import StepRecord

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
