"""Clips gradients by their norm: within the step of the optimizer where its kernel can, else in a pass of its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks


def clip_by_norm(gradients: list[Tensor], norm: Tensor, most: float, within: Optimizer | None = None) -> None:
    """Scale `gradients` in place as `torch.nn.utils.clip_grad_norm_` does, so that their norm is at most `most`.

    A pass of its own reads and writes all gradients. torch's fused Adam and AdamW divide them by a number while they
    update the weights, and write them too, so that they are the same after the step.

    Args:
        gradients: of one rank.
        norm: a scalar, the norm of the gradients of all ranks.
        within: the optimizer that steps next, before which nothing looks at the gradients; None: clip now.
    """
    if not gradients:
        return
    if within is not None and _divides(within, gradients):
        within.grad_scale = ((norm.float() + 1e-6) / most).clamp(min=1.0)  # type: ignore[attr-defined]
    else:
        torch._foreach_mul_(gradients, (most / (norm + 1e-6)).clamp(max=1.0))


def after_step(optimizer: Optimizer) -> None:
    """Forget what `clip_by_norm` has left for the step."""
    optimizer.__dict__.pop("grad_scale", None)


def _divides(optimizer: Optimizer, gradients: list[Tensor]) -> bool:
    """Whether its kernel can, and nobody sees the gradients before that.

    The divisor is in fp32, so gradients in fp64 would lose digits; in 16 bits they would be rounded differently.
    """
    of_shards = hasattr(optimizer, "sharded_parameters")  # strategies/step_on_shards.py has one hook
    hooks = len(optimizer._optimizer_step_pre_hooks) - of_shards + len(_global_optimizer_pre_hooks)
    return (
        not hooks
        and type(optimizer) in (Adam, AdamW)
        and all(group["fused"] for group in optimizer.param_groups)
        and all(gradient.dtype == torch.float32 for gradient in gradients)
    )
