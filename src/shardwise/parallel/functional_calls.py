"""Refuses `torch.func.functional_call` where a layer would compute with its own weights in spite of the call."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.utils import stateless

from shardwise.errors import ConfigError

_own_weights: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # a layer → why, and what to use


def refuse_functional_calls(layers: Iterable[nn.Module], why: str) -> None:
    """From now on, calls that replace parameters of `layers`, or of what is in them, raise a ConfigError with `why`."""
    _own_weights.update(dict.fromkeys(layers, why))
    setattr(stateless, "_functional_call", _checked)  # noqa: B010 - its type is another


_original = stateless._functional_call


@functools.wraps(_original)
def _checked(module: nn.Module, replaced: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if any(layer in _own_weights for layer in module.modules()):
        own = dict(module.named_parameters(remove_duplicate=False))
        for name in own:
            if name in replaced:
                _check(module, name)
    return _original(module, replaced, *args, **kwargs)


def _check(module: nn.Module, name: str) -> None:
    layer = module
    for part in (*name.split(".")[:-1], None):
        if (why := _own_weights.get(layer)) is not None:
            raise ConfigError(f"functional_call replaces {name} of {type(module).__name__}: {why}")
        if part is not None:
            layer = getattr(layer, part)
