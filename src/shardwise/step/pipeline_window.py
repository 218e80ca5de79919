"""The accumulation window of a pipeline: its micro-batches run together, when all of them are there.

Lightning's loop goes on as ever: for each micro-batch `training_step` notes the batch and returns a stand-in for the
loss. The backward of the window's last stand-in runs the schedule (strategies/pipelined.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.pipeline.absent import pending
from shardwise.step.window import AccumulationWindow, share_of_loss


class PipelineWindow(AccumulationWindow):
    """The batches of the current step, and the losses that its last stage computes of them."""

    def __init__(self, micro_batches: int, device: torch.device) -> None:
        super().__init__(micro_batches)
        self.batches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []  # the arguments of each training_step
        self._factors: list[Tensor | None] = []
        self._device = device
        self._found: dict[int, Tensor] = {}  # micro-batch → its share of the loss of the window

    def begin(self) -> None:
        super().begin()
        self.batches, self._factors, self._found = [], [], {}

    def begin_micro_batch(self, scale: Tensor | None) -> None:
        self._factors.append(scale)

    def go_to(self, number: int) -> None:
        """A stage computes this micro-batch next."""
        self._factor = self._factors[number]

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Keep a micro-batch for the schedule. Gives what Lightning differentiates in place of its loss."""
        self.batches.append((args, kwargs))
        return pending(self._device)

    @property
    def is_full(self) -> bool:
        """Whether every micro-batch of the step is there."""
        return len(self.batches) == self.micro_batches

    def scale_loss_of(self, number: int, loss: Tensor) -> Tensor:
        """The loss to differentiate: the share of this micro-batch in the loss of the global batch."""
        scaled = share_of_loss(loss / self.micro_batches, self._factors[number])
        self._found[number] = scaled.detach().reshape(())
        if len(self._found) == self.micro_batches:
            self.losses = [self._found[i] for i in range(self.micro_batches)]
        return scaled

    def share(self, skip_requested: Tensor | None, group: dist.ProcessGroup) -> Tensor | None:
        """Give all stages the losses and the request to skip of the last one, the first of `group`. Collective."""
        values = torch.zeros(self.micro_batches + 1, dtype=torch.float64, device=self._device)
        if self.losses:
            skip = torch.zeros((), device=self._device) if skip_requested is None else skip_requested
            values = torch.stack([*(loss.double() for loss in self.losses), skip.double()])
        dist.broadcast(values, group_src=0, group=group)
        if not self.losses:
            self.losses = list(values[:-1].unbind())
        return values[-1] > 0

    def end(self) -> None:
        """Let go of the batches."""
        self.batches = []


def shapes_in(batch: Any) -> Hashable:
    """The shapes of all tensors in a batch, with the places where they are."""
    return tuple(_shapes(batch))


def _shapes(value: Any) -> Iterator[Hashable]:
    if isinstance(value, Tensor):
        yield tuple(value.shape)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _shapes(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _shapes(item)
        yield "end"  # a subclass's len() may raise
    elif hasattr(value, "__dict__"):
        yield from _shapes(vars(value))
