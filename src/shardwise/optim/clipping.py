"""Clips gradients by their norm: within the step of the optimizer where its kernel can, else in a pass of its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def clip_by_norm(gradients: list[Tensor], norm: Tensor, most: float, within: Optimizer | None = None) -> None:
    """Scale `gradients` in place as `torch.nn.utils.clip_grad_norm_` does, so that their norm is at most `most`.

    A pass of its own reads and writes all gradients. torch's fused Adam and AdamW divide them by a number while they
    update the weights, and write them too, so that they are the same after the step. Both ways give the same bits,
    since one rank alone may have to take the other one.

    Args:
        gradients: of one rank.
        norm: a scalar, the norm of the gradients of all ranks.
        within: the optimizer that steps next, before which nothing looks at the gradients; None: clip now.
    """
    if not gradients:
        return
    divisor = ((norm + 1e-6) / most).clamp(min=1.0)
    if within is not None and _divides(within, gradients, divisor):
        within.grad_scale = divisor  # type: ignore[attr-defined]
    else:
        torch._foreach_div_(gradients, divisor)


def after_step(optimizer: Optimizer) -> None:
    """Forget what `clip_by_norm` has left for the step."""
    optimizer.__dict__.pop("grad_scale", None)


def _divides(optimizer: Optimizer, gradients: list[Tensor], divisor: Tensor) -> bool:
    """Whether its kernel can, and no hook sees the gradients before that.

    It reads the divisor as fp32. Gradients in fp64 would lose digits; in 16 bits they would be rounded differently.
    """
    return (
        type(optimizer) in (Adam, AdamW)
        and all(group["fused"] for group in optimizer.param_groups)
        and all(tensor.dtype == torch.float32 for tensor in (divisor, *gradients))
        and not _hooks_of_others(optimizer)
    )


def _hooks_of_others(optimizer: Optimizer) -> int:
    own = hasattr(optimizer, "sharded_parameters")  # strategies/step_on_shards.py has one
    return len(optimizer._optimizer_step_pre_hooks) - own + len(_global_optimizer_pre_hooks)


def has_hooks_of_others(optimizer: Optimizer) -> bool:
    """Whether hooks that shardwise has not registered run before or after each step of `optimizer`."""
    own = hasattr(optimizer, "sharded_parameters")
    behind = len(optimizer._optimizer_step_post_hooks) - own + len(_global_optimizer_post_hooks)
    return _hooks_of_others(optimizer) + behind > 0
