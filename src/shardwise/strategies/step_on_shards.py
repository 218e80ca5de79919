"""Lets an optimizer step on the local parts of DTensors, because the arithmetic of DTensors takes the host too long."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.distributed.dtensor import local_part
from shardwise.distributed.matrices import ShardedMatrices
from shardwise.distributed.parameters import renew_optimizer
from shardwise.optim.optimizers import check_by_hand, check_of_parts, steps_on_shards, use_matrices
from shardwise.strategies.sharded_state import DTensorState


def hand_over(optimizer: Optimizer, state: DTensorState, strategy: str) -> None:
    """Give an optimizer that the module has made the shards, and local parts of them if it treats weights one by one.

    Raises:
        ConfigError: it needs whole tensors, or has state of them.
    """
    renew_optimizer(optimizer)
    if state.tensor_parallel is not None:
        check_of_parts(optimizer)
    if not state.module.automatic_optimization:
        check_by_hand(optimizer, strategy)
    elif steps_on_shards(optimizer):
        step_on_shards(optimizer, state)


def take_new_shards(optimizers: list[Optimizer]) -> None:
    """Let optimizers step on the shards that a hook of a batch has added to their groups."""
    for optimizer in optimizers:
        getattr(optimizer, "take_new_shards", lambda: None)()


def step_on_shards(optimizer: Optimizer, state: DTensorState) -> None:
    """Give the optimizer local parts in place of its parameters, and their gradients while it steps."""
    sharded: list[nn.Parameter] = []
    local: dict[int, nn.Parameter] = {}

    def take_shards() -> None:
        """Take those of the groups. Of a group that was added while weights were whole, it takes them behind that."""
        for group in optimizer.param_groups:
            own = {id(p) for p in local.values()}
            # Of one that left its group and came back the local part stays, for which the optimizer keeps its state
            came = [p for p in group["params"] if id(p) not in own and id(p) not in local]
            sharded.extend(came)
            for p in came:
                p.grad = None  # of the steps before
            local.update({id(p): nn.Parameter(local_part(p.detach()), requires_grad=False) for p in came})
            group["params"] = [local.get(id(p), p) for p in group["params"]]
        state.step_on(local)
        nonlocal taken
        taken = count()

    def count() -> int:
        return sum(len(group["params"]) for group in optimizer.param_groups)

    def take_new_ones() -> None:
        if count() != taken:
            take_shards()

    taken = 0
    take_shards()
    use_matrices(optimizer, lambda: ShardedMatrices(sharded, [local[id(p)] for p in sharded]))

    def show_gradients(*_: Any) -> None:
        for p in sharded:
            local[id(p)].grad = p.grad._local_tensor if isinstance(p.grad, DTensor) else p.grad

    def hide_gradients(*_: Any) -> None:
        for p in sharded:
            local[id(p)].grad = None

    def zero_grad(set_to_none: bool = True) -> None:
        for p in sharded:
            p.grad = None

    optimizer.register_step_pre_hook(show_gradients)
    optimizer.register_step_post_hook(hide_gradients)
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    optimizer.take_shards = take_shards  # type: ignore[attr-defined]
    optimizer.take_new_shards = take_new_ones  # type: ignore[attr-defined]
    optimizer.sharded_parameters = sharded  # type: ignore[attr-defined] # the parameters that have the gradients
