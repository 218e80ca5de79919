"""What ZeRO cannot train, said before DeepSpeed would give other numbers or a traceback."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.lightning_internals.hooks import current_hook
from shardwise.optim.optimizers import treats_weights_one_by_one
from shardwise.strategies.whole_weights import gives_tensors, tensors_in_objects
from shardwise.strategies.zero.unused_parameters import LastGradients


def refuse_inner_backward(strategy: Any) -> None:
    """Refuse a backward pass within a step: ZeRO-3 would free weights and not gather them for the next pass."""
    if strategy.module.trainer.training and not strategy.zero_precision.is_in_backward:
        hook = current_hook(strategy.module)
        who = ".training_step" if hook == "training_step" else f" or a callback, in {hook},"
        raise ConfigError(
            f"{strategy.module_name}{who} takes a gradient (torch.autograd.grad), and behind that the weights are gone "
            f"under {strategy.plan.strategy.name}; use strategy=fsdp, zero2 or ddp"
        )


def refuse_idle(strategy: Any, gradients: LastGradients) -> None:
    if idle := gradients.left_out():
        names = [name for name, p in strategy.module.named_parameters() if p in idle]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise ConfigError(
            f"{strategy.module_name}: {', '.join(names[:4])}{more} took no part in the loss, and did in earlier steps; "
            f"{strategy.plan.strategy.name} would step them with their gradients of then: give "
            f"strategy.find_unused_parameters=true"
        )


def refuse_objects(layer: nn.Module, name: str) -> None:
    """Refuse outputs inside objects: ZeRO-3 gathers a layer's weights by hooks on its output tensors."""

    def check(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or gives_tensors(output):
            return
        if any(tensor.grad_fn is not None for tensor in tensors_in_objects((output, args, kwargs))):
            raise ConfigError(
                f"{type(layer).__name__} passes tensors on inside an object, where {name} does "
                f"not find them; pass tensors, tuples or dicts, or use strategy=fsdp, zero2 or ddp"
            )

    layer.register_forward_hook(check, with_kwargs=True)


def check_support(strategy: Any, optimizer: Optimizer) -> None:
    """Refuse hooks that DeepSpeed would ignore, and optimizers that would give other numbers under it."""
    name, module = strategy.plan.strategy.name, strategy.module
    if hooks := [hook for hook in ("backward", "configure_gradient_clipping") if is_overridden(hook, module)]:
        raise ConfigError(
            f"{strategy.module_name} has its own {', '.join(hooks)}, and under {name} gradients are in DeepSpeed's "
            f"hands, out of reach: leave it out, or use strategy=ddp or fsdp"
        )
    if not treats_weights_one_by_one(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} is not known to treat every weight by itself, and DeepSpeed gives it flat "
            f"pieces without rows or columns: use AdamW or SGD, strategy=ddp, or, if it does, set is_elementwise = "
            f"True on it"
        )
