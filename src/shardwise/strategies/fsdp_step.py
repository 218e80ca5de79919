"""The optimizer's step on FSDP2's shards: the local parts, weights without dimensions, and what is refused of parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.distributed.dtensor import ShardedMatrices, listing_whole, local_part, reading_whole
from shardwise.distributed.mesh import sum_over
from shardwise.distributed.parameters import renew_optimizer
from shardwise.errors import ConfigError
from shardwise.optim.optimizers import check_by_hand, check_of_parts, steps_on_shards, use_matrices
from shardwise.step.precision_plugin import PlannedPrecision
from shardwise.strategies.sharded_state import DTensorState

# Lets an optimizer step on the local parts of DTensors, because the arithmetic of DTensors takes the host too long.


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


# Weights without dimensions, which FSDP2 does not shard: each rank has them, and gradients are averaged here.


class FsdpPrecision(PlannedPrecision):
    """Lets gradients be those of all ranks before `on_after_backward` looks at them."""

    def settle_by(self, settle: Callable[[], None]) -> None:
        """Let `settle` make them so, behind each backward pass."""
        self._settle = settle

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        self._settle()
        return super().post_backward(tensor, module)


class Scalars:
    """The weights without dimensions of a module."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
        """`group`: of the ranks whose gradients are averaged, in `dtype`; None: there is one rank."""
        self.module, self.group, self.dtype = module, group, dtype
        self._at_first = self._all()

    def _all(self) -> list[nn.Parameter]:
        return [] if self.group is None else [p for p in self.module.parameters() if p.ndim == 0]

    def hold_hooks(self) -> None:
        """Let hooks behind the sums of gradients wait for the average."""
        for p in self._at_first:
            hooks: Any = p._post_accumulate_grad_hooks or {}
            for key, hook in hooks.items():
                if not isinstance(hook, _Waiting):
                    hooks[key] = _Waiting(hook)

    def average(self) -> None:
        """Average the gradients and call the hooks that have waited. Collective."""
        trained = [p for p in self._all() if p.requires_grad]
        if self.group is None or not trained:
            return
        gradients = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in trained])
        gradients = gradients.to(self.dtype) / self.group.size()
        sum_over(self.group, gradients)
        for p, gradient in zip(trained, gradients.unbind(), strict=True):
            p.grad = gradient.to(p.dtype)
            for hook in list((p._post_accumulate_grad_hooks or {}).values()):
                if isinstance(hook, _Waiting):
                    hook.hook(p)


class _Waiting:
    """A hook in its place among those of a weight, from where its handle may remove it."""

    def __init__(self, hook: Callable[[Tensor], None]) -> None:
        self.hook = hook

    def __call__(self, parameter: Tensor) -> None:
        """Do nothing: the gradient is this rank's own yet."""


# Refuses what code of the user's would do with parts of gradients and weights as if they were whole.
#
# Each rank of a tensor axis has such parts, and they are no DTensors, which know of what they are a part.


@contextmanager
def refused(who: str) -> Iterator[None]:
    """Refuse inside what is computed of whole gradients, since it would differ between ranks."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise read_by(who)

    with (
        reading_whole(refuse),
        listing_whole(refuse),
        patch.object(torch.nn.utils.clip_grad, "_get_total_norm", refuse),
    ):
        yield


def read_by(who: str) -> ConfigError:
    """The error for numbers that are read of parts."""
    return ConfigError(
        f"{who} reads numbers of gradients or weights, of which each rank has a part under "
        f"strategy.tensor_parallel_size: leave it out (train/gradient_norm is logged anyway, and "
        f"self.clip_gradients clips by the whole norm), or use strategy.tensor_parallel_size=1"
    )


def refuse_writes(module_name: str) -> None:
    """Refuse a write into a part of what may be a part already.

    Raises:
        ConfigError
    """
    raise ConfigError(
        f"{module_name} or a callback writes into a part of a gradient or weight (p.grad[:8] = 0, say), and under "
        f"strategy.tensor_parallel_size a rank may have a part of it: change it as a whole (p.grad.mul_(2)), or use "
        f"strategy.tensor_parallel_size=1"
    )
