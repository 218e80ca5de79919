"""When the stages of one rank hand their gradients to FSDP2's reduction, over the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning.pytorch import LightningModule
from torch.distributed.fsdp import FSDPModule

from shardwise.distributed.parameters import is_hooked_behind_sums
from shardwise.lightning_internals.hooks import is_hooked
from shardwise.parallel.pipeline.stages import Stages
from shardwise.plan import Plan
from shardwise.strategies.fsdp_gathering import switched_off

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
