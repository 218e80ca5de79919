"""How fast a run is: speed, waiting for data, MFU, memory, goodput. docs/metrics.md has the formulas."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.metrics.csv_logger import read_metrics
from shardwise.plan import Plan
from shardwise.run_dir.files import METRICS, STARTS, write_whole
from shardwise.step.record import StepRecord

SPENT = "train/training_seconds"


@dataclass
class Sums:
    """Over some steps; loss weights and FLOPs are those of all ranks."""

    steps: int = 0
    seconds: float = 0.0
    waiting_seconds: float = 0.0  # of this rank's device, for data
    weight: float = 0.0
    flops: float = 0.0

    def add(self, other: Sums) -> None:
        self.steps += other.steps
        self.seconds += other.seconds
        self.waiting_seconds += other.waiting_seconds
        self.weight += other.weight
        self.flops += other.flops


class Meter:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.first = Sums()  # this process's first step, which compiles, allocates and connects
        self.rest = Sums()
        self.interval = Sums()  # since the last row
        self.spent_before = 0.0  # in steps of earlier processes that count: those up to their checkpoint
        self.started = process_start()  # of the run's first process

    def on_start(self) -> None:
        """Find what this run has been through; on rank 0, note that it starts."""
        folder = Path(self.plan.run_dir)
        rows = [row for row in read_metrics(folder / METRICS) if row.get(SPENT)]
        self.spent_before = float(rows[-1][SPENT]) if rows else 0.0
        starts = folder / STARTS
        times = json.loads(starts.read_text()) if starts.exists() else []
        write_whole(starts, json.dumps([*times, self.started]) + "\n")
        self.started = min([*times, self.started])

    def add(self, step: StepRecord, weight: float, flops: float) -> None:
        """`weight` and `flops`: of all ranks."""
        # The device waits from the end of the step before until its batch is there, but for data only as long as the
        # host did: the rest is the host being behind.
        waiting = min(step.begin.until(step.arrived), step.fetching_seconds)
        sums = Sums(1, step.begin.until(step.end), waiting, weight, flops)
        (self.rest if self.first.steps else self.first).add(sums)
        self.interval.add(sums)

    def take_interval(self) -> Sums:
        """What was added since this was last asked."""
        interval, self.interval = self.interval, Sums()
        return interval

    @property
    def steady(self) -> Sums:
        """Of this process; without its first step, where there are others."""
        return self.rest if self.rest.steps else self.first

    def mfu(self, sums: Sums) -> float | None:
        """Model FLOPs utilisation: the FLOPs that the model needs, over what the GPUs could have done in that time."""
        peak = self.plan.peak_tflops
        if not sums.flops or peak is None:
            return None
        return sums.flops / (sums.seconds * self.plan.topology.world_size * peak * 1e12)

    @property
    def training_seconds(self) -> float:
        """In steps whose work the run still has; a process's first counts as its others, at most."""
        steady = self.steady
        first = steady.seconds / steady.steps if steady.steps else 0.0
        return self.spent_before + self.rest.seconds + min(first, self.first.seconds)

    @property
    def goodput(self) -> float:
        """The share of the time since the run's first start that became training steps."""
        return self.training_seconds / max(time.time() - self.started, 1e-9)


def memory_gib(plan: Plan) -> tuple[float, float]:
    """This rank's peaks: allocated by tensors, reserved by the allocator. Zero on the CPU."""
    if plan.accelerator != "cuda":
        return 0.0, 0.0
    peaks = torch.cuda.memory_stats_as_nested_dict()  # the functions for one of them each make all of them flat first
    return peaks["allocated_bytes"]["all"]["peak"] / 2**30, peaks["reserved_bytes"]["all"]["peak"] / 2**30


def process_start() -> float:
    """When this process was started, in seconds since 1970: imports are a run's time too."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        return time.time()
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
