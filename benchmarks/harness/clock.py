"""Clocks: in the data set, in a callback, and for contenders that take turns within one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from benchmarks.harness.device import peaks_gib, wait_for
from benchmarks.harness.gpus import GpuWatch


class DataClock:
    """Measures steps from within the data set, which every contender asks for one batch a step: no callback and no hook
    is added. The data set calls `tick`.

    Waits for the device when the timed steps begin and when they are over, and nowhere between.
    """

    def __init__(self, device: torch.device, warm_up: int, timed: int) -> None:
        self.device, self.warm_up, self.timed = device, warm_up, timed
        self.steps = warm_up + timed + 1  # the clock stops when the batch of the step after is asked for
        self.asked = 0
        self.times: list[float] = []  # at which the timed steps, and the one after them, asked
        self.cpu_seconds = float("nan")

    def tick(self) -> None:
        done = self.asked - self.warm_up
        self.asked += 1
        if done < 0 or done > self.timed:
            return
        if done in (0, self.timed):
            wait_for(self.device)
            self.cpu_seconds = time.process_time() - (0 if done == 0 else self.cpu_seconds)
        self.times.append(time.perf_counter())

    def result(self) -> dict[str, float]:
        """Seconds a step. `quiet`: the lowest tenth of stretches of ten steps, which is what they take while nobody
        else uses the machine. For a device that works while the host goes on it says nothing."""
        steps = len(self.times) - 1
        stretches = sorted(end - begin for begin, end in zip(self.times[:-10:10], self.times[10::10], strict=False))
        seconds = {
            "seconds_per_step": (self.times[-1] - self.times[0]) / steps,
            "cpu_seconds_per_step": self.cpu_seconds / steps,
        }
        return seconds | ({"quiet_seconds_per_step": stretches[len(stretches) // 10] / 10} if stretches else {})


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one contender: the median of its rounds, or the first error."""
    errors = [row["error"] for row in rows if "error" in row]
    times = [row["seconds_per_step"] for row in rows if "error" not in row]
    told: dict[str, Any] = {"error": errors[0]} if errors else {} if times else {"error": "did not come to it"}
    if times:
        told |= {"seconds_per_step": median(times), "lowest": min(times), "highest": max(times), "rounds": times}
        if peaks := [row["peak_allocated_gib"] for row in rows if "peak_allocated_gib" in row]:
            told["peak_allocated_gib"] = max(peaks)
        told["cpu_seconds_per_step"] = median(row["cpu_seconds_per_step"] for row in rows if "error" not in row)
        if quiet := [row["quiet_seconds_per_step"] for row in rows if "quiet_seconds_per_step" in row]:
            told["quiet_seconds_per_step"] = min(quiet)
    return told


class StepTimer(Callback):
    """Seconds a step between two synchronisations, and the peak memory of the whole run."""

    def __init__(self, device: torch.device, warm_up: int, timed: int, accumulate: int) -> None:
        self.device, self.timed = device, timed
        self.first, self.last = warm_up * accumulate, (warm_up + timed) * accumulate  # batches

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == self.first:
            wait_for(self.device)
            self.begin = time.perf_counter()
        if batch_idx + 1 == self.last:
            wait_for(self.device)
            self.seconds = (time.perf_counter() - self.begin) / self.timed

    def result(self) -> dict[str, Any]:
        return {"seconds_per_step": self.seconds, **peaks_gib(self.device)}


class TurnsClock(Callback):
    """In one process and in turn, round after round: a stretch of the Trainer's steps, one of each plain loop's.

    The clock rate of a GPU varies more than the contenders differ, so that measurements a minute apart cannot be
    compared so closely. Each stretch settles for a few steps and ends in a synchronisation.
    """

    SETTLE = 5

    def __init__(
        self, device: torch.device, plain: dict[str, Callable[[], Any]], watch: GpuWatch, *, samples: int,
        warm_up: int, plain_warm_up: int, timed: int, rounds: int,
    ) -> None:  # fmt: skip
        self.device, self.plain, self.samples = device, plain, samples  # of one step
        self.watch, self.felt = watch, {}
        self.warm_up, self.plain_warm_up, self.timed = warm_up, plain_warm_up, timed
        self.steps = warm_up + rounds * (self.SETTLE + timed)
        self.seconds: dict[str, list[float]] = {name: [] for name in ("trainer", *plain)}
        # Of a round: the host's seconds before each timed step, while it gets a batch, and within it.
        self.for_data: list[list[float]] = []
        self.for_steps: list[list[float]] = []

    def on_train_start(self, *_: Any) -> None:
        for step in self.plain.values():
            for _ in range(self.plain_warm_up):
                step()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx - self.warm_up) % (self.SETTLE + self.timed) >= self.SETTLE and batch_idx >= self.warm_up:
            self.began = time.perf_counter()
            self.for_data[-1].append(self.began - self.ended)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        done = batch_idx + 1 - self.warm_up
        if done < 0:
            return
        if self.for_steps and (done - 1) % (self.SETTLE + self.timed) >= self.SETTLE:
            self.for_steps[-1].append(time.perf_counter() - self.began)
        self._turn(done, batch_idx)
        self.ended = time.perf_counter()

    def _turn(self, done: int, batch_idx: int) -> None:
        position = done % (self.SETTLE + self.timed)
        if position == 0:
            if done == 0:
                self.watch.begin()
            else:
                wait_for(self.device)
                self.seconds["trainer"].append(time.perf_counter() - self.mark)
            for name, step in self.plain.items():
                self.seconds[name].append(self._stretch(step))
            if batch_idx + 1 == self.steps:
                self.felt = self.watch.end()
        if position == self.SETTLE:
            wait_for(self.device)
            self.for_data.append([])
            self.for_steps.append([])
            self.mark = time.perf_counter()

    def _stretch(self, step: Callable[[], Any]) -> float:
        """Seconds of the timed steps of a plain loop."""
        for _ in range(self.SETTLE):
            step()
        wait_for(self.device)
        mark = time.perf_counter()
        for _ in range(self.timed):
            step()
        wait_for(self.device)
        return time.perf_counter() - mark

    @property
    def result(self) -> dict[str, Any]:
        """A round's ratio is that of the trainer's stretch to the mean of the plain ones before and after it."""
        images = self.timed * self.samples
        rates = {name: [images / s for s in seconds] for name, seconds in self.seconds.items()}
        found: dict[str, Any] = {
            "images_per_second": median(rates["trainer"]),
            "rounds": rates,
            "ratios": {},
            "gpu": self.felt,
        }
        for name, rows in (("data", self.for_data), ("steps", self.for_steps)):
            found |= {
                f"seconds_for_{name}": [sum(row) for row in rows],
                f"longest_for_{name}": [max(row) for row in rows],
            }
        for name in self.plain:
            around = zip(rates["trainer"], pairwise(rates[name]), strict=True)
            found["ratios"][name] = [ours / ((before + after) / 2) for ours, (before, after) in around]
        return found
