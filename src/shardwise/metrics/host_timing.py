"""What each rank tells of its own steps, garbage collections and memory at every row: what verdicts are made from."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from shardwise import accelerator
from shardwise.metrics.rank_values import RankValues, Shown
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
from shardwise.step.host_times import HostSums, HostTimes

# Means of a step since the last row:
#   SECONDS     between the ends of two steps, by the host's clock
#   BUSY        the host's own work, without waiting: see step/host_times.py
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
