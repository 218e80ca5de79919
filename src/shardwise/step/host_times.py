"""Measures what a rank's host does in each step, without waiting for the device.

A step that the ranks make together takes equally long on all of them: those that are ready wait for the slow one. So
what tells a slow rank is what it does without the others. On a GPU that is the host's time outside of waiting, and the
device's time in a forward pass that sends nothing. On the CPU, where the host is the device, it is the time in which
this process computes, and the time in such a forward pass in which it does not (it sleeps, or reads a file).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from shardwise.plan import Plan


@dataclass
class HostSums:
    """Sums over the steps since the last row, of one rank. Seconds of the host's clock."""

    steps: int = 0
    seconds: float = 0.0
    busy_seconds: float = 0.0  # the host's own work; on the CPU the part of a forward pass that is not computing
    waiting_seconds: float = 0.0  # CPU: after the batch has come, this rank neither computes nor is `busy`
    compute_seconds: float = 0.0  # GPU: the first forward pass of each step; CPU: computing after the batch has come
    steps_asked: int = 0  # GPU: steps at whose begin the host asked whether the device had ended the step before …
    steps_idle: int = 0  # … and it had


class HostTimes:
    """Adds up the times of one rank's steps. The strategy and the guard say what happens when."""

    def __init__(self, plan: Plan) -> None:
        self.on_cpu = plan.accelerator == "cpu"
        # Where layers are gathered in the forward pass, a rank waits there for the others
        self.forward_is_alone = not plan.capabilities.shards_parameters
        # Each step, DeepSpeed's engine and a loss scaler make the host wait for the device
        self.waits_unseen = not self.on_cpu and (plan.capabilities.owns_step or plan.precision.loss_scaling)
        self._queue = RunQueue() if self.on_cpu else None
        self._sums = HostSums()
        self.restart()

    def restart(self) -> None:
        """Let the next step begin now: the time since the last one belongs to neither."""
        self._begin = self._now()
        self._waited = 0.0  # the time of this step in which the host waited for the device
        self._device_was_awaited = True  # so that it is idle when the next step begins

    def device_was_awaited(self) -> None:
        """Note that the host has waited until the device had done everything: that it is idle now says nothing."""
        self._device_was_awaited = True

    def batch_fetched(self, device_is_idle: bool | None) -> None:
        """Note that the loader has given the step's first batch. `device_is_idle`: the device has ended the last step;
        None: not known."""
        if device_is_idle is not None and not (self._device_was_awaited or self.waits_unseen):
            self._sums.steps_asked += 1
            self._sums.steps_idle += device_is_idle
        self._device_was_awaited = False

    def batch_arrived(self) -> None:
        """Note that the step's first batch is on the device."""
        self._off_cpu = 0.0
        if self.on_cpu:
            self._arrived, self._thread, self._process = self._now(), time.thread_time(), time.process_time()

    def forward_ended(self) -> None:
        """Note the end of the first forward pass of a step that was called for the batch that has arrived."""
        if self.on_cpu and self.forward_is_alone:
            self._off_cpu = max(0.0, self._now() - self._arrived - (time.thread_time() - self._thread))

    def step_ended(self, fetching_seconds: float) -> None:
        """Note the end of the host's work for a step. `fetching_seconds`: of it, waiting for the data loader."""
        now, sums = self._now(), self._sums
        seconds = now - self._begin
        sums.steps += 1
        sums.seconds += seconds
        if self.on_cpu:
            computing = time.thread_time() - self._thread
            sums.busy_seconds += self._off_cpu
            sums.waiting_seconds += max(0.0, now - self._arrived - computing - self._off_cpu)
            sums.compute_seconds += time.process_time() - self._process
        else:
            sums.busy_seconds += max(0.0, seconds - fetching_seconds - self._waited)
        self._begin, self._waited = now, 0.0

    def _now(self) -> float:
        """The host's clock; on the CPU without the time in which this thread waited for a core that another had."""
        return time.perf_counter() - (0.0 if self._queue is None else self._queue.seconds())

    def waited(self, seconds: float) -> None:
        """Add time in which the host waited for the device."""
        self._waited += seconds

    def add_forward(self, seconds: float) -> None:
        """Add the device's time in the first forward pass of a step."""
        self._sums.compute_seconds += seconds

    def take(self) -> HostSums:
        """The sums since the last call."""
        sums, self._sums = self._sums, HostSums()
        return sums


class RunQueue:
    """How long the thread that made this has waited for a core, by the kernel's count; always 0 where it has none."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:  # not Linux
            self._file = None

    def seconds(self) -> float:
        if self._file is None:
            return 0.0
        return int(os.pread(self._file, 64, 0).split()[1]) / 1e9

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)
