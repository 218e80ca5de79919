"""What a step came to: written on the device, read by the host some steps later. Nothing on the step path waits."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
class Step:
    """One optimizer step, still on its way."""

    number: int  # the step counter after it
    start: int  # the training clock before it, in samples
    learning_rate: float
    loss_scale: float | None
    passed_over: bool | None  # the optimizer left everything as it was; None: `values` will tell
    # Loss, gradient norm, passed over, passed over on purpose (1, or not); of several ranks: the sums of the loss and
    # of `own`
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
