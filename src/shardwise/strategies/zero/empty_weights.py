"""Finds reads of weights that ZeRO-3 has freed. It leaves an empty tensor in their place, whose norm would be 0."""

from __future__ import annotations

import inspect
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwise.errors import ConfigError

_TORCH = Path(torch.__file__).parent
_OTHERS = ("deepspeed", "lightning", "shardwise")  # who may look at what is left of a weight
# What an empty weight has in common with the whole one. Of attributes, only these few are not.
_SAME_WHERE_EMPTY = {"requires_grad_", "is_floating_point", "is_complex", "element_size", "register_hook", "get_device",
                     "register_post_accumulate_grad_hook", "retain_grad", "__hash__", "__repr__", "__format__",
                     "data_ptr", "untyped_storage", "is_pinned", "is_inference", "has_names", "type"}  # fmt: skip
_OF_VALUES = {getattr(Tensor, name) for name in ("data", "shape", "ndim", "T", "mT", "H", "mH", "real", "imag")}


class EmptyWeightsRefused(TorchFunctionMode):
    """Refuses to compute with weights that are not there, inside. `where`: the hook or step that runs."""

    def __init__(self, names: dict[int, str], where: str) -> None:
        """`names`: the id of each parameter → its name."""
        super().__init__()
        self.where, self._names = where, names

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _reads_values(function):
            for tensor in chain.from_iterable(map(_listed, (*args, *kwargs.values()))):
                if id(tensor) in self._names and _is_freed(tensor) and (line := _users_line()) is not None:
                    raise ConfigError(
                        f"{self.where} ({line}) reads the weight {self._names[id(tensor)]}, which is not there: zero3 "
                        f"gathers weights for the layers that run; put `with shardwise.gathered_weights(module):` "
                        f"around it in a hook, or give whole_weights_in=[on_train_batch_end], say; a loss of weights "
                        f"needs strategy=zero2 or ddp"
                    )
        return function(*args, **kwargs)


def _reads_values(function: Any) -> bool:
    """Whether this call of torch needs the values or the shape of its tensors."""
    if getattr(function, "__name__", "") == "__get__":
        return getattr(function, "__self__", None) in _OF_VALUES
    return getattr(function, "__name__", "") not in (*_SAME_WHERE_EMPTY, "__set__")


def _listed(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)


def _is_freed(weight: Any) -> bool:
    """Whether ZeRO-3 has freed this weight, or has not yet received it."""
    return hasattr(weight, "ds_status") and weight.ds_status.name != "AVAILABLE"


def _users_line() -> str | None:
    """The line of the user's code that has called torch; None: a strategy has."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if not (part := _part_of_torch(file)) and file != __file__:
            package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            return None if package in _OTHERS else f"{Path(file).name}, line {frame.f_lineno}"
        if part == "distributed":
            return None
        frame = frame.f_back
    return None


@cache
def _part_of_torch(file: str) -> str:
    """The folder or file of torch that a source file lies in; "" for all others."""
    path = Path(file)
    return path.relative_to(_TORCH).parts[0] if path.is_relative_to(_TORCH) else ""
