"""Refuses `torch.func.functional_call` where a layer would compute with its own weights in spite of the call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.utils import stateless

from shardwise.errors import ConfigError, class_name

# A layer → for which of its parameters, why, and what to use
_own_weights: WeakKeyDictionary[nn.Module, tuple[Callable[[nn.Parameter], bool], str]] = WeakKeyDictionary()


def refuse_functional_calls(layers: Iterable[nn.Module], why: str, when: Callable[[nn.Parameter], bool]) -> None:
    """From now on, calls that replace parameters of `layers`, or of what is in them, raise a ConfigError with `why`.

    `when`: asked at such a call, with the parameter that it replaces.
    """
    _own_weights.update(dict.fromkeys(layers, (when, why)))
    setattr(stateless, "_functional_call", _checked)  # noqa: B010 - its type is another


def _never(parameter: nn.Parameter) -> bool:
    return False


_original = stateless._functional_call


@functools.wraps(_original)
def _checked(module: nn.Module, replaced: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if any(layer in _own_weights for layer in module.modules()):
        own = dict(module.named_parameters(remove_duplicate=False))
        for name, parameter in own.items():
            if name in replaced:
                _check(module, name, parameter)
    return _original(module, replaced, *args, **kwargs)


def _check(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    layer = module
    for part in (*name.split(".")[:-1], None):
        when, why = _own_weights.get(layer, (_never, ""))
        if when(parameter):
            raise ConfigError(f"functional_call replaces {name} of {class_name(module)}: {why}")
        if part is not None:
            layer = getattr(layer, part)
