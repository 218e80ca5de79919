"""Lets an optimizer step on the local parts of DTensors, because the arithmetic of DTensors takes the host too long."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.distributed.dtensor import local_part
from shardwise.distributed.matrices import ShardedMatrices
from shardwise.optim.optimizers import use_matrices
from shardwise.strategies.sharded_state import DTensorState


def step_on_shards(optimizer: Optimizer, state: DTensorState) -> None:
    """Give the optimizer local parts in place of its parameters, and their gradients while it steps."""
    sharded = [p for group in optimizer.param_groups for p in group["params"]]
    local = {id(p): nn.Parameter(local_part(p.detach()), requires_grad=False) for p in sharded}
    state.step_on(local)
    for group in optimizer.param_groups:
        group["params"] = [local[id(p)] for p in group["params"]]
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
    optimizer.sharded_parameters = sharded  # type: ignore[attr-defined] # the parameters that have the gradients
