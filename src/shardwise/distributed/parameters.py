"""What a module notes on its parameters: attributes (`p.no_weight_decay = True`) and hooks on their gradients.

Parameters are replaced by others: by those that have memory, by shards, by parts. What was noted goes along.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigError

_OF_DTENSORS = ("_local_tensor", "_spec")


def keep_attributes(new: Tensor, old: Tensor) -> None:
    """Give `new`, which takes the place of `old`, the attributes that were set on it."""
    for name, value in vars(old).items():
        if name not in _OF_DTENSORS:
            setattr(new, name, value)


def keep_notes(new: nn.Parameter, old: Tensor) -> nn.Parameter:
    """Give `new`, which takes the place of `old`, its attributes and the hooks on its gradient. Returns `new`."""
    keep_attributes(new, old)
    of, on, is_trained = cast(Any, old), cast(Any, new), new.requires_grad
    new.requires_grad_(is_trained or bool(of._backward_hooks))  # torch refuses a hook on what is frozen at the moment
    for hook in (of._backward_hooks or {}).values():
        on.register_hook(hook)
    for hook in (of._post_accumulate_grad_hooks or {}).values():
        on.register_post_accumulate_grad_hook(hook)
    new.requires_grad_(is_trained)
    return new


def is_hooked_behind_sums(parameter: Tensor) -> bool:
    """Whether a hook runs each time that a gradient was added to this parameter's."""
    return bool(parameter._post_accumulate_grad_hooks)


def refuse_gradient_hooks(module: nn.Module, whose: str, strategy: str) -> None:
    """Refuse hooks on the gradients of shards, which nobody calls. `whose`: the module's name.

    Raises:
        ConfigError
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and parameter._backward_hooks:
            raise ConfigError(
                f"{whose} or a callback has registered a hook on the gradient of {name} (register_hook), which is not "
                f"called under {strategy}: there are no whole gradients; change gradients in on_before_optimizer_step, "
                f"use register_post_accumulate_grad_hook in configure_optimizers, or use strategy=ddp"
            )
