"""The accumulation window of a pipeline: its micro-batches run together, and then gradients are reduced."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from shardwise.distributed.parameters import is_hooked_behind_sums
from shardwise.lightning_internals.hooks import is_hooked
from shardwise.parallel.pipeline.placeholders import pending
from shardwise.parallel.pipeline.stages import Stages
from shardwise.plan import Plan
from shardwise.step.window import AccumulationWindow, share_of_loss
from shardwise.strategies.fsdp_gathering import switched_off

# The accumulation window of a pipeline: its micro-batches run together, when all of them are there.
#
# Lightning's loop goes on as ever: for each micro-batch `training_step` notes the batch and returns a stand-in for the
# loss. The backward of the window's last stand-in runs the schedule (strategies/pipelined.py).


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


# When the stages of one rank hand their gradients to FSDP2's reduction, over the micro-batches of a step.

_WHOLE = "set_requires_gradient_sync"  # FSDP2's switch: while it is off, gradients add up before they are sharded


class StageGradients:
    """`layers`: all that FSDP2 shards on this rank. `count`: the stages of all ranks."""

    def __init__(
        self, plan: Plan, module: LightningModule, stages: Stages, layers: Sequence[FSDPModule], count: int
    ) -> None:
        self._plan, self._module, self._layers = plan, module, layers
        self._add_up_whole = False
        self._elsewhere = {stage: _elsewhere(stages, layers, stage, count) for stage in stages.ownership.stages}

    def begin_step(self) -> None:
        """Find out whether gradients add up whole: as the user says, or since no ranks share them and nobody looks.

        FSDP2 would copy them several times after each micro-batch.
        """
        topology = self._plan.topology
        self._add_up_whole = self._plan.strategy.defer_gradient_sync or (
            topology.shard * topology.context == 1
            and not is_hooked(self._module.trainer, "on_after_backward")
            and not any(map(is_hooked_behind_sums, self._module.parameters()))
        )

    def are_due(self, is_last: bool, is_end: bool) -> bool:
        """Whether gradients of earlier backward passes are reduced in this one, so that it must not be left out."""
        return is_end if self._add_up_whole else is_last and self._plan.topology.replicate > 1

    @contextmanager
    def in_backward(self, stage: int, is_last: bool, is_end: bool) -> Iterator[None]:
        """Inside, FSDP2 reduces what this backward pass of `stage` has to hand over.

        `is_last`: no other one of this stage follows in the step. `is_end`: none of this rank does.
        """
        if self._add_up_whole:  # until the end, in whichever stage that is
            waits, others = [] if is_end else [_WHOLE], []
        else:  # the other stages of this rank have nothing new
            waits, others = [] if is_last else ["set_requires_all_reduce"], self._elsewhere[stage]
        if self._plan.strategy.reshard_after_forward is False and not is_end:  # weights stay for the next micro-batch
            waits.append("set_reshard_after_backward")
        with switched_off(self._layers, *waits), switched_off(others, _WHOLE):
            yield


def _elsewhere(stages: Stages, layers: Sequence[FSDPModule], stage: int, count: int) -> list[FSDPModule]:
    """The layers that have no part in `stage`. What is outside of units is in the first and last one."""
    numbers = {id(layer): number for number, layer in enumerate(stages.layers)}
    has_outside, own = stage in (0, count - 1), range(*stages.ownership.units_of(stage))

    def has_part(layer: FSDPModule) -> bool:
        number = numbers.get(id(layer))
        return has_outside if number is None else number in own

    return [layer for layer in layers if not has_part(layer)]
