"""The numbers of a step: the device writes them, and the host reads them some steps later without waiting."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from shardwise import accelerator
from shardwise.distributed.mesh import Mesh, sum_over
from shardwise.plan import Plan
from shardwise.step.precision_plugin import PlannedPrecision
from shardwise.step.window import AccumulationWindow

# The host reads a step's numbers this many steps after its end, so that the device has work meanwhile.
LAG = 2


class Tick:
    """A moment of the device's work: on a GPU an event in its stream, elsewhere the time itself."""

    def __init__(self, device: torch.device) -> None:
        self.event: torch.Event | None = None
        if accelerator.has_streams(device):
            self.event = torch.Event(device, enable_timing=True)  # four times as fast to record as a new_event
            self.event.record()
        else:
            self.seconds = time.perf_counter()

    def wait(self) -> None:
        """Wait until the device has reached this moment."""
        if self.event is not None:
            self.event.synchronize()

    def is_over(self) -> bool | None:
        """Whether the device has reached this moment, asked without waiting; None on a device without events."""
        return None if self.event is None else self.event.query()

    def until(self, later: Tick) -> float:
        """The seconds until `later`. On a GPU the device must have reached both."""
        if self.event is not None and later.event is not None:
            return float(self.event.elapsed_time(later.event)) / 1e3
        return later.seconds - self.seconds


class Readback:
    """Numbers on their way from the device."""

    def __init__(self, values: Tensor) -> None:
        # Pinned. Without an event to wait for, the copy is waited for here.
        self.values = values.to("cpu", non_blocking=accelerator.has_streams(values.device))
        self.end = Tick(values.device)  # the device has written the numbers

    def read(self) -> list[float]:
        """The numbers. Waits only if the device has not written them yet."""
        self.end.wait()
        return [float(value) for value in self.values.tolist()]


@dataclass(frozen=True)
class StepNumbers:
    """What the host has read of a step."""

    loss: float  # the mean over the global batch
    gradient_norm: float  # over all ranks, before clipping
    skipped: bool  # the optimizer changed nothing
    skipped_on_purpose: bool  # the run was told to skip it: a spike, or a window that is passed over
    loss_weight: float  # of all ranks: samples, tokens
    flops: float  # of all ranks
    signal_requests: float  # the sum over the ranks, see process/signals.py


@dataclass
class StepRecord:
    """The numbers of one optimizer step, which may still be on their way from the device."""

    number: int  # the step counter after the step
    start: int  # the training clock before the step, in samples
    learning_rate: float
    loss_scale: float | None
    step_skipped: bool | None  # whether the optimizer changed nothing; None: the device tells it in `values`
    # In this order: this rank's loss, the gradient norm over all ranks, whether the step was skipped, whether on
    # purpose. With several ranks there follow sums over them: of the loss, and of the three numbers of `of_rank`.
    values: Readback
    ranks: int  # that are summed over
    of_rank: tuple[float, int, int]  # loss weight and FLOPs of this rank's micro-batches, and its signal requests
    losses: list[Tensor]  # what each micro-batch of this rank added to the loss
    gradients: list[tuple[nn.Parameter, Tensor]]  # parameters and the norms of this rank's parts of their gradients
    begin: Tick
    arrived: Tick  # when the first batch was on the device
    fetching_seconds: float  # the time that the host waited for the data loader
    forward_end: Tick | None = None  # on a GPU, of the first forward pass, if it sends nothing to other ranks

    @property
    def end(self) -> Tick:
        return self.values.end

    def read(self) -> StepNumbers:
        """Waits only if the device has not written the numbers yet."""
        loss, norm, skipped, on_purpose, *sums = self.values.read()
        total, weight, flops, requests = sums or (loss, *self.of_rank)
        return StepNumbers(
            loss=total / self.ranks,
            gradient_norm=norm,
            skipped=bool(skipped if self.step_skipped is None else self.step_skipped),
            skipped_on_purpose=bool(on_purpose),
            loss_weight=weight,
            flops=flops,
            signal_requests=requests,
        )


class LoadedWindow(Protocol):
    """What the loader knows about the window that it has handed over: see data/loaders.py."""

    window_start: int
    window_weight: float
    window_flops: int
    fetching_seconds: float


class StepRecorder:
    """Times each step and sends its numbers to the host."""

    def __init__(self, device: torch.device, mesh: Mesh) -> None:
        self.device, self.mesh = device, mesh
        self.times = HostTimes(mesh.plan)
        self._forward_end: Tick | None = None
        self._begin: Tick | None = None  # when the current step began
        self._arrived: Tick | None = None
        self._zero = torch.zeros((), device=device)
        self._of_rank: tuple[float, int, int] | None = None  # see `StepRecord.of_rank`
        self._of_rank_on_device = torch.empty(0)  # the same numbers

    def restart_clock(self) -> None:
        """Let the next step begin now: the time since the last step belongs to neither."""
        self._begin = Tick(self.device)
        self.times.restart()

    def batch_fetched(self) -> None:
        """Note that the first batch of a window is on the host. A copy from memory that is not pinned waits for the
        device, so it is asked before whether it has ended the last step."""
        self.times.batch_fetched(None if self._begin is None else self._begin.is_over())

    def batch_arrived(self) -> None:
        """Note that the first batch of a window is on the device."""
        self.times.batch_arrived()
        self._arrived, self._forward_end = Tick(self.device), None

    def forward_ended(self, is_first: bool) -> None:
        """Note the end of a forward pass. Only the window's first one is timed."""
        if not is_first:
            return
        self.times.forward_ended()
        if self.times.forward_is_alone and accelerator.has_streams(self.device):
            self._forward_end = Tick(self.device)

    def read(self, step: StepRecord) -> StepNumbers:
        """The numbers of a step. Waits only if the device has not written them yet."""
        begin = time.perf_counter()
        numbers = step.read()
        self.times.waited(time.perf_counter() - begin)
        if step.forward_end is not None:
            self.times.add_forward(step.arrived.until(step.forward_end))
        return numbers

    def finish(
        self,
        number: int,
        loader: LoadedWindow,
        window: AccumulationWindow,
        precision: PlannedPrecision,
        learning_rate: float,
        signal_requests: int,
    ) -> StepRecord:
        """Record the window that has just ended as step `number`. Collective; does not wait for the numbers."""
        assert self._begin is not None and self._arrived is not None
        verdict, skipped = precision.verdict, precision.verdict.step_skipped
        loss, norm = window.loss if window.losses else self._zero, precision.gradient_norm
        if norm is not None and norm.device != loss.device:  # DeepSpeed gives it on the host
            norm = torch.full_like(self._zero, norm.item())
        if not isinstance(skipped, Tensor):  # the host has waited for it
            self.times.device_was_awaited()
        values = [loss, norm, skipped if isinstance(skipped, Tensor) else None, verdict.skip_requested]
        # This is one kernel if all have one dtype, as is usual.
        numbers = torch.stack([self._zero if value is None else value for value in values])
        of_rank = (loader.window_weight, loader.window_flops, signal_requests)
        if self.mesh.group("world").size() > 1:
            numbers = torch.cat([numbers, self._sums_over_ranks(loss, of_rank)])
        step = StepRecord(
            number=number,
            start=loader.window_start,
            learning_rate=learning_rate,
            loss_scale=precision.loss_scale,
            step_skipped=None if isinstance(skipped, Tensor) else skipped,
            values=Readback(numbers),
            ranks=self.mesh.group("loss").size(),
            of_rank=of_rank,
            losses=window.losses,
            gradients=precision.gradients,
            begin=self._begin,
            arrived=self._arrived,
            fetching_seconds=loader.fetching_seconds,
            forward_end=self._forward_end,
        )
        self._begin = step.end
        self.times.step_ended(loader.fetching_seconds)
        verdict.clear_request()
        return step

    def _sums_over_ranks(self, loss: Tensor, of_rank: tuple[float, int, int]) -> Tensor:
        """The sums of the loss and of `of_rank`, in one small collective. Does not wait.

        What peers on an axis share is counted once. A signal may reach any rank.
        """
        dtype = torch.float64
        if not self.mesh.counts_samples:
            loss, of_rank = self._zero, (0, 0, of_rank[2])
        if of_rank != self._of_rank:  # seldom: most steps have equally many tokens
            self._of_rank = of_rank
            self._of_rank_on_device = torch.stack([torch.full_like(loss, n, dtype=dtype) for n in of_rank])
        return sum_over(self.mesh.group("world"), torch.cat([loss.to(dtype).reshape(1), self._of_rank_on_device]))


# Measures what a rank's host does in each step, without waiting for the device.
#
# A step that the ranks make together takes equally long on all of them: those that are ready wait for the slow one. So
# what tells a slow rank is what it does without the others. On a GPU that is the host's time outside of waiting, and
# the device's time in a forward pass that sends nothing. On the CPU, where the host is the device, it is the time in
# which this process computes, and the time in such a forward pass in which it does not (it sleeps, or reads a file).


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
