"""Finds the hooks of a module or callback that look at weights. These hooks see whole weights, as under ddp.

Only for these are weights gathered. Whether a hook looks at weights is found from the names in its code.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric

# These hooks look at gradients, which belong to the shards.
_OF_GRADIENTS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
# In these they have been computed, and may be changed.
LOOK_AT_GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad",
                     "configure_gradient_clipping")  # fmt: skip
# The others look at a batch, or run when there are no weights yet.
_OTHERS = (*_OF_GRADIENTS, "on_before_batch_transfer", "on_after_batch_transfer", "on_exception")
_WALKS = {
    "parameters", "named_parameters", "state_dict", "load_state_dict", "modules", "named_modules", "children",
    "named_children", "get_parameter", "get_submodule", "apply", "param_groups", "_parameters", "_modules", "model",
    "__dict__", "deepcopy", "weight", "bias", "requires_grad_",
}  # fmt: skip
_LIBRARIES = {"lightning", "torch", "torchmetrics", "shardwise", "deepspeed", "numpy", "wandb", "tensorboard"}
_LIBRARIES |= sys.stdlib_module_names
_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
_NO_WEIGHTS = (bool, int, float, complex, str, bytes, Metric, Trainer)


def may_look(hook: str) -> bool:
    """Whether a hook of this name can look at weights. Every rank calls such a hook (unlike `prepare_data`)."""
    return hook.startswith("on_") and hook not in _OTHERS


def may_run_layers(hook: str, automatic: bool) -> bool:
    """Whether a hook of this name can run layers outside of a step, and runs no step itself (as `optimizer_step` does).

    `automatic`: whether Lightning optimizes. A module that does so by hand calls the hooks of gradients in its step.
    """
    return may_look(hook) or (automatic and hook in (*_OF_GRADIENTS, "lr_scheduler_step"))


def looks_at_weights(host: LightningModule | Callback, hook: str, module: LightningModule) -> str | None:
    """The name in the code of `hook` of `host` by which it may look at weights of `module`; none if it cannot."""
    if not may_look(hook):
        return None
    names = {name for name, _ in module.named_parameters(recurse=False)}
    names |= {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    return _reaches(getattr(host, hook), host, names, set())


def _reaches(function: Any, host: Any, weights: set[str], seen: set[Any]) -> str | None:
    function = inspect.unwrap(getattr(function, "__func__", function))
    if _is_of_a_library(function) or function in seen:
        return None
    if isinstance(function, type) and issubclass(function, (LightningDataModule, Metric)):
        return None
    if not isinstance(function, FunctionType):
        return str(getattr(function, "__name__", type(function).__name__))
    seen.add(function)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if not _is_filled(cell):
            continue
        value = cell.cell_contents
        if isinstance(value, FunctionType):
            if reached := _reaches(value, host, weights, seen):
                return reached
        elif not _has_no_weights(value):
            return name
    names = list(_names(function.__code__))
    for operation, name in names:
        if name in _WALKS or (operation == "IMPORT_NAME" and name.partition(".")[0] not in _LIBRARIES):
            return name
        if operation in _OF_GLOBALS:
            used = function.__globals__.get(name)
            if isinstance(used, ModuleType) and used.__name__.partition(".")[0] not in _LIBRARIES:
                return name
            if callable(used) and (reached := _reaches(used, host, weights, seen)):
                return reached
            if not callable(used) and not _is_of_a_library(type(used)):  # an object with methods
                for _, called in names:
                    if reached := _reaches_by_method(called, used, weights, seen)[1]:
                        return reached
            continue
        if name in weights:
            return name
        is_method, reached = _reaches_by_method(name, host, weights, seen)
        if reached:
            return reached
        if is_method or name not in getattr(host, "__dict__", ()):
            continue
        if not _has_no_weights(vars(host)[name]):
            return name
    return None


def _reaches_by_method(name: str, host: Any, weights: set[str], seen: set[Any]) -> tuple[bool, str | None]:
    """Whether the class of `host` has `name`, and the name by which this method reaches weights."""
    found = [vars(kind)[name] for kind in type(host).__mro__ if name in vars(kind)]
    reached = (_reaches(method, host, weights, seen) for method in found if _is_code(method))
    return bool(found), next(filter(None, reached), None)


def _is_code(method: Any) -> bool:
    return isinstance(method, (FunctionType, staticmethod, classmethod)) or hasattr(method, "__wrapped__")


def _is_filled(cell: Any) -> bool:
    try:
        return not isinstance(cell.cell_contents, type)  # super() captures the class
    except ValueError:
        return False


def _names(code: CodeType) -> Iterator[tuple[str, str]]:
    """What `code` does, and to which attribute or global, also in functions inside it."""
    yield from ((found.opname, found.argval) for found in dis.get_instructions(code) if found.opcode in dis.hasname)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_of_a_library(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] in _LIBRARIES


def _has_no_weights(value: Any) -> bool:
    """Whether `value` has no weights in it, now and later. None has, since it may be replaced by anything."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple, set)):
        return all(_has_no_weights(item) for item in value)
    if isinstance(value, nn.Parameter):
        return False
    return isinstance(value, (*_NO_WEIGHTS, Tensor)) or (
        _is_of_a_library(type(value)) and not isinstance(value, nn.Module)
    )
