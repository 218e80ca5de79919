"""What a step came to: written on the device, read by the host some steps later. Nothing on the step path waits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from shardwise.distributed.collectives import sum_over
from shardwise.distributed.mesh import Mesh
from shardwise.step.precision_plugin import PlannedPrecision
from shardwise.step.window import AccumulationWindow

LAG = 2  # steps between a step's end and the reading of its numbers: the device has work while the host reads


class Tick:
    """A moment of the device's work: on CUDA an event in its stream, elsewhere the time itself."""

    def __init__(self, device: torch.device) -> None:
        self.event: torch.Event | None = None
        if device.type == "cuda":
            self.event = torch.Event(device, enable_timing=True)  # a quarter of torch.cuda.Event's time to record
            self.event.record()
        else:
            self.seconds = time.perf_counter()

    def wait(self) -> None:
        """For the device, where it is not there yet."""
        if self.event is not None:
            self.event.synchronize()

    def until(self, later: Tick) -> float:
        """Seconds. On CUDA both must have been reached."""
        if self.event is not None and later.event is not None:
            return float(self.event.elapsed_time(later.event)) / 1e3
        return later.seconds - self.seconds


class Readback:
    """Numbers on their way from the device."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.to("cpu", non_blocking=True)  # pinned
        self.there = Tick(values.device)

    def read(self) -> list[float]:
        """Waits only where the device is not there yet."""
        self.there.wait()
        return [float(value) for value in self.values.tolist()]


@dataclass
class StepRecord:
    """One optimizer step, still on its way."""

    number: int  # the step counter after it
    start: int  # the training clock before it, in samples
    learning_rate: float
    loss_scale: float | None
    step_skipped: bool | None  # the optimizer left everything as it was; None: `values` will tell
    # Loss, gradient norm, step skipped, skipped on purpose (1, or not); of several ranks: the sums of the loss and of
    # `own`
    values: Readback
    own: tuple[int, int, int]  # loss weight and FLOPs of this rank's micro-batches; what signals have asked it for
    losses: list[Tensor]  # what each of this rank's micro-batches added to the loss
    gradients: list[tuple[nn.Parameter, Tensor]]  # with the norm of what this rank holds of its gradient
    begin: Tick
    arrived: Tick  # of its first batch on the device
    fetching_seconds: float  # of the host, in the data loader

    @property
    def end(self) -> Tick:
        return self.values.there


class LoadedWindow(Protocol):
    """What the loader knows of the window that it has handed over: see data/loaders.py."""

    window_start: int
    window_weight: int
    window_flops: int
    fetching_seconds: float


class StepRecorder:
    """Times each step and sends its numbers to the host."""

    def __init__(self, device: torch.device, mesh: Mesh) -> None:
        self.device, self.mesh = device, mesh
        self._begin: Tick | None = None  # of the step that is under way
        self._arrived: Tick | None = None
        self._zero = torch.zeros((), device=device)
        self._own: tuple[int, int, int] | None = None  # see `StepRecord.own`; and the same on the device
        self._own_on_device = torch.empty(0)

    def restart_clock(self) -> None:
        """What comes now is the next step's; what came since the last one was not."""
        self._begin = Tick(self.device)

    def batch_arrived(self) -> None:
        """The first one of a window is on the device."""
        self._arrived = Tick(self.device)

    def finish(
        self,
        number: int,
        loader: LoadedWindow,
        window: AccumulationWindow,
        precision: PlannedPrecision,
        learning_rate: float,
        signal_requests: int,
    ) -> StepRecord:
        """The window that has just ended, as step `number`; its numbers are on their way. Collective; does not wait."""
        assert self._begin is not None and self._arrived is not None
        verdict, skipped = precision.verdict, precision.verdict.step_skipped
        loss, norm = window.loss if window.losses else self._zero, precision.gradient_norm
        if norm is not None and norm.device != loss.device:  # DeepSpeed's
            norm = torch.full_like(self._zero, norm.item())
        values = [loss, norm, skipped if isinstance(skipped, Tensor) else None, verdict.skip_requested]
        # Of one dtype, as they mostly are, one kernel
        numbers = torch.stack([self._zero if value is None else value for value in values])
        own = (loader.window_weight, loader.window_flops, signal_requests)
        if self.mesh.group("loss").size() > 1:
            numbers = torch.cat([numbers, self._sums_over_ranks(loss, own)])
        step = StepRecord(
            number=number,
            start=loader.window_start,
            learning_rate=learning_rate,
            loss_scale=precision.loss_scale,
            step_skipped=None if isinstance(skipped, Tensor) else skipped,
            values=Readback(numbers),
            own=own,
            losses=window.losses,
            gradients=precision.gradients,
            begin=self._begin,
            arrived=self._arrived,
            fetching_seconds=loader.fetching_seconds,
        )
        self._begin = step.end
        verdict.clear_request()
        return step

    def _sums_over_ranks(self, loss: Tensor, own: tuple[int, int, int]) -> Tensor:
        """Collective; does not wait."""
        if own != self._own:  # seldom: every step of a language model has as many tokens
            self._own = own
            self._own_on_device = torch.stack([torch.full_like(loss, n, dtype=torch.float64) for n in own])
        return sum_over(self.mesh.group("loss"), torch.cat([loss.double().reshape(1), self._own_on_device]))
