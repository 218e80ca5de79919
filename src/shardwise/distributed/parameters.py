"""What a module notes on its parameters: attributes (`p.no_weight_decay = True`) and hooks on their gradients.

Parameters are replaced by others: by those that have memory, by shards, by parts. What was noted goes along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.errors import ConfigError

_OF_DTENSORS = ("_local_tensor", "_spec")
_REPLACED_BY = "shardwise_replaced_by"
_WITHIN = 3  # a list of pairs in a dict
_PLAIN = {bool, int, float, str, type(None)}
_MANY = 100  # items, of which the first tells whether they are weights or samples
_KNOWN = ("builtins", "torch.", "lightning.", "shardwise.", "deepspeed.")  # whose objects keep no weights of a module's


def keep_attributes(new: Tensor, old: Tensor) -> None:
    """Give `new`, which takes the place of `old`, the attributes that were set on it."""
    for name, value in vars(old).items():
        if name not in (*_OF_DTENSORS, _REPLACED_BY):
            setattr(new, name, value)


def keep_notes(new: nn.Parameter, old: Tensor) -> nn.Parameter:
    """Give `new`, which takes the place of `old`, its attributes and the hooks on its gradient. Returns `new`."""
    keep_attributes(new, old)
    setattr(old, _REPLACED_BY, new)
    of, on, is_trained = cast(Any, old), cast(Any, new), new.requires_grad
    new.requires_grad_(is_trained or bool(of._backward_hooks))  # torch refuses a hook on what is frozen at the moment
    for hook in (of._backward_hooks or {}).values():
        on.register_hook(hook)
    for hook in (of._post_accumulate_grad_hooks or {}).values():
        on.register_post_accumulate_grad_hook(hook)
    new.requires_grad_(is_trained)
    return new


def current(parameter: Any) -> Any:
    """What stands in the place of a parameter that was replaced, or the parameter itself."""
    while (new := getattr(parameter, _REPLACED_BY, None)) is not None:
        parameter = new
    return parameter


def renew_references(module: LightningModule, find: Callable[[Any], Any] = current) -> None:
    """Let what layers and callbacks keep as attributes (lists of weights, pairs, objects with them) follow the weights.

    `find`: what now stands in the place of a parameter.
    """
    callbacks: list[Any] = module.trainer.callbacks  # type: ignore[attr-defined]
    theirs = [one for one in callbacks if not type(one).__module__.startswith(_KNOWN)]
    for holder in (*module.modules(), *theirs):
        _renew_attributes(holder, _WITHIN, find)


def _renew_attributes(holder: Any, within: int, find: Callable[[Any], Any]) -> None:
    for name, value in list(vars(holder).items()):
        if (
            not name.startswith("_")
            and type(value) not in _PLAIN
            and (new := _renewed(value, within, find)) is not value
        ):
            vars(holder)[name] = new


def renew_optimizer(optimizer: Optimizer) -> None:
    """Let an optimizer that was built before the weights were sharded have the shards.

    Raises:
        ConfigError: it has state of the whole weights already.
    """
    for group in optimizer.param_groups:
        new = [current(p) for p in group["params"]]
        if any(a is not b and a in optimizer.state for a, b in zip(group["params"], new, strict=True)):
            raise ConfigError(
                f"{type(optimizer).__name__} was built before the weights were sharded, and has state of whole ones: "
                f"build it in configure_optimizers, or use strategy=ddp"
            )
        group["params"] = new


def _renewed(value: Any, within: int, find: Callable[[Any], Any]) -> Any:
    if isinstance(value, nn.Parameter):
        return find(value)
    if not within or not (items := _items(value)):
        return value
    if len(items) > _MANY and not _holds_weights(items[0], within - 1):
        return value
    if type(value) in (list, tuple):
        new = [_renewed(one, within - 1, find) for one in items]
        if any(a is not b for a, b in zip(new, items, strict=True)):
            if isinstance(value, tuple):
                return tuple(new)
            value[:] = new  # others may have the same list
    elif type(value) is dict:
        value.update({key: _renewed(one, within - 1, find) for key, one in value.items()})
    else:
        _renew_attributes(value, within - 1, find)
    return value


def _items(value: Any) -> list[Any]:
    """What a list, a tuple, a dict or an object of the user's has in it."""
    if type(value) in (list, tuple):
        return list(value)
    if isinstance(value, (Tensor, nn.Module, type)) or type(value).__module__.startswith(_KNOWN):
        return list(value.values()) if type(value) is dict else []
    return list(vars(value).values()) if hasattr(value, "__dict__") else []


def _holds_weights(value: Any, within: int) -> bool:
    return isinstance(value, nn.Parameter) or (within > 0 and any(_holds_weights(v, within - 1) for v in _items(value)))


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
