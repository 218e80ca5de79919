"""Lets a layer return a tensor that it was given, and that it does not change, as the same tensor.

Casts and the hooks of FSDP2 and DeepSpeed put other tensors in the place of a layer's inputs and outputs. But positions
may travel through layers in a dict, and forces are the gradient of an energy by them: by another tensor than the one
that all layers have used, it would be a part of the force, or none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def return_passed_tensors(layer: nn.Module) -> None:
    """Let `layer` do so, whatever casts around its present `forward` and other hooks do to inputs and outputs."""
    forward = layer.forward
    given: list[Tensor] = []  # by the caller
    same: dict[int, tuple[Tensor, Tensor]] = {}  # id of a tensor that forward got → this tensor, the caller's
    passed: list[Tensor | None] = []  # for each tensor that forward has returned: the caller's, if it is the same
    is_last: list[Any] = []  # the hook `after`, behind those that the strategy registers later

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        given.clear()
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            given.extend(_tensors((args, kwargs)))
            if not is_last:
                is_last.append(layer.register_forward_hook(after, with_kwargs=True))

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        got = [] if not given or torch.compiler.is_compiling() else _tensors((args, kwargs))
        if len(got) != len(given) or not got:
            return forward(*args, **kwargs)
        pairs = [(tensor, tensor._version, theirs) for tensor, theirs in zip(got, given, strict=True)]
        output = forward(*args, **kwargs)
        same.update({id(tensor): (tensor, theirs) for tensor, version, theirs in pairs if tensor._version == version})
        returned = _tensors(output)
        passed[:] = [same.get(id(tensor), (None, None))[1] for tensor in returned]
        if returned and None not in passed:  # a strategy's hooks need one: other ranks may run what this one skips
            passed[next((n for n, theirs in enumerate(passed) if theirs is not None and not theirs.is_leaf), 0)] = None
        return output

    def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if same:  # DeepSpeed writes its tensors into a dict of the caller
            _replace(lambda tensor: same.get(id(tensor), (tensor, tensor))[1], (args, kwargs))
        if any(tensor is not None for tensor in passed):
            found = iter(passed)
            output = _replace(lambda tensor: tensor if (theirs := next(found)) is None else theirs, output)
        for kept in (given, same, passed):
            kept.clear()
        return output

    layer.forward = run
    layer.register_forward_pre_hook(before, prepend=True, with_kwargs=True)


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _replace(note, value)
    return found


def _replace(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Replace every tensor that needs gradients in a nest of containers; in dicts and dataclasses where they are."""
    if isinstance(value, Tensor):
        return function(value) if value.requires_grad else value
    if isinstance(value, dict):
        for key, item in value.items():
            if (other := _replace(function, item)) is not item:
                value[key] = other
    elif isinstance(value, (tuple, list)):
        items = [_replace(function, item) for item in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            return type(value)(items) if type(value) in (tuple, list) else type(value)(*items)  # a named tuple
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if (other := _replace(function, item := getattr(value, field.name))) is not item:
                object.__setattr__(value, field.name, other)
    return value
