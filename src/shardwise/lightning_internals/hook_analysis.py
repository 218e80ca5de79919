"""Finds the hooks of a module or callback that look at weights. These hooks see whole weights, as under ddp.

Only for these are weights gathered. Whether a hook looks at weights is found from the names in its code.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
from collections.abc import Iterator, Set
from dataclasses import fields, is_dataclass
from functools import cached_property, partial, partialmethod
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torchmetrics import Metric

# These hooks look at gradients, which belong to the shards. In on_before_zero_grad there are none any more.
_OF_GRADIENTS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")
# In these they have been computed, and may be changed.
LOOK_AT_GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
# In these, weights and gradients are in the strategy's hands. The last ones are called where Lightning's do all, too.
NOT_GATHERED = (*LOOK_AT_GRADIENTS, "on_before_backward", "optimizer_step", "lr_scheduler_step")
_OF_LIGHTNING = ("configure_gradient_clipping", "optimizer_step", "lr_scheduler_step")
# Hooks of a step itself, in which weights are whole under some strategies only (`weights_in_steps`).
OF_STEPS = (*_OF_GRADIENTS, "optimizer_zero_grad", "optimizer_step", "lr_scheduler_step")
# The others look at a batch, or run when there are no weights yet.
_OTHERS = (*_OF_GRADIENTS, "on_before_batch_transfer", "on_after_batch_transfer", "on_exception")
_WALKS = {
    "parameters", "named_parameters", "state_dict", "load_state_dict", "modules", "named_modules", "children",
    "named_children", "get_parameter", "get_submodule", "apply", "param_groups", "_parameters", "_modules", "model",
    "__dict__", "deepcopy", "weight", "bias", "requires_grad_", "getattr", "vars", "attrgetter",
}  # fmt: skip
_GROUPS = "param_groups"  # a hook of steps sets learning rates there, and looks at weights by this key of theirs:
_OF_GROUPS = "params"
# What reads weights in a step other than by calling layers. (ZeRO-3 gathers the `weight` of a layer when it is asked.)
_READS = {"parameters", "named_parameters", "state_dict", "get_parameter", "_parameters", "deepcopy"}
_OF_ANY_WEIGHT = ("dtype", "device")  # next(self.parameters()).dtype, which is known without its values
_LIBRARIES = {"lightning", "torch", "torchmetrics", "shardwise", "deepspeed", "numpy", "wandb", "tensorboard"}
# These do not know torch's weights, but may be used in a hook.
_LIBRARIES |= {"hydra", "matplotlib", "omegaconf", "pandas", "PIL", "psutil", "rich", "scipy", "sklearn", "tqdm"}
_LIBRARIES |= sys.stdlib_module_names
_SIMPLE = ("LOAD_", "FORMAT_", "BUILD_STRING", "CONVERT_VALUE")
_PATTERN = "pattern"  # in place of an instruction: a regular expression for the name of an attribute
_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
_NO_WEIGHTS = (bool, int, float, complex, str, bytes, Metric, Trainer)


def may_look(hook: str) -> bool:
    """Whether a hook of this name can look at weights. Every rank calls such a hook (unlike `prepare_data`)."""
    return hook.startswith("on_") and hook not in _OTHERS


def runs_own_code(hook: str, module: LightningModule) -> bool:
    """Whether `hook`, one of `NOT_GATHERED`, runs code that is not Lightning's, if it is called."""
    return hook not in _OF_LIGHTNING or has_own(hook, module)


def has_own(hook: str, module: LightningModule) -> bool:
    """Whether the module has overridden the hook, in its class or by an attribute."""
    return is_overridden(hook, module) or hook in vars(module)


def may_run_layers(hook: str, automatic: bool) -> bool:
    """Whether a hook of this name can run layers outside of a step, and runs no step itself (as `optimizer_step` does).

    `automatic`: whether Lightning optimizes. A module that does so by hand calls the hooks of gradients in its step.
    """
    return may_look(hook) or (automatic and hook in (*_OF_GRADIENTS, "lr_scheduler_step"))


def looks_at_weights(
    host: LightningModule | Callback, hook: str, module: LightningModule, *, also: tuple[str, ...] = ()
) -> str | None:
    """The name in the code of `hook` of `host` by which it may look at weights of `module`; none if it cannot.

    `also`: hooks of steps in which a strategy makes weights whole.
    """
    if hook in also:
        return looks_in_step(getattr(host, hook), host, module)
    return _Search(_weights_of(module), module).reaches(getattr(host, hook), host) if may_look(hook) else None


def looks_in_step(function: Any, host: Any, module: LightningModule) -> str | None:
    """The same of a function that is called in each step."""
    return _Search(_weights_of(module), module, _WALKS - {_GROUPS}, {_OF_GROUPS}).reaches(function, host)


def reads_in_step(module: LightningModule, step: str) -> str | None:
    """The name by which a step, or a method of a layer that it calls, may read weights beside calling layers."""
    search = _Search(set(), module, _READS, {_OF_GROUPS})
    if found := search.reaches(getattr(module, step), module):
        return found
    called = {name for function, _ in list(search.seen) for _, name in _names(function.__code__)} - {"forward"}
    layers = {
        type(layer): layer for layer in module.modules() if layer is not module and not _is_of_a_library(type(layer))
    }
    methods = ((vars(kind)[name], layer) for kind, layer in layers.items() for name in called & vars(kind).keys())
    found_there = (search.reaches(code, layer) for method, layer in methods if (code := _code_of(method)) is not None)
    return next(filter(None, found_there), None)


def _weights_of(module: LightningModule) -> set[str]:
    names = {name for name, _ in module.named_parameters(recurse=False)}
    return names | {name for name, child in module.named_children() if any(True for _ in child.parameters())}


class _Search:
    """Follows names. `weights`: those of the parameters and layers of `module`, whose methods any host may call.

    `walks`: names by which weights are reached, `keys`: texts by which they are.
    """

    def __init__(
        self, weights: set[str], module: LightningModule, walks: Set[str] = _WALKS, keys: Set[str] = frozenset()
    ) -> None:
        self.weights, self.module, self.walks, self.keys = weights, module, walks, keys
        self.seen: set[tuple[Any, int]] = set()  # a function, and the id of the host with which it was followed

    def reaches(self, function: Any, host: Any) -> str | None:
        """The name by which `function` may reach weights. `host`: the object whose methods and attributes it uses."""
        function = inspect.unwrap(getattr(function, "__func__", function))
        if _is_of_a_library(function) or (function, id(host)) in self.seen:
            return None
        if isinstance(function, type) and issubclass(function, (LightningDataModule, Metric)):
            return None
        if not isinstance(function, FunctionType):
            return str(getattr(function, "__name__", type(function).__name__))
        self.seen.add((function, id(host)))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if _is_filled(cell) and (reached := self._by_value(cell.cell_contents, name, host)):
                return reached
        if self.keys and (key := next((text for text in _texts(function.__code__) if text in self.keys), None)):
            return key
        names = list(_names(function.__code__))
        for number, (operation, name) in enumerate(names):
            if name in self.walks and not self._asks_for_dtype(names[max(number - 4, 0) : number + 2]):
                return name
            if reached := self._by_name(operation, name, function, names, host):
                return reached
        return None

    def _asks_for_dtype(self, names: list[tuple[str, str]]) -> bool:
        """Whether these names, of which the last is behind `parameters`, do so. Hooks have weights in any case."""
        return self.walks is not _WALKS and ("LOAD_GLOBAL", "next") in names and names[-1][1] in _OF_ANY_WEIGHT

    def _by_name(
        self, operation: str, name: str, function: FunctionType, names: list[tuple[str, str]], host: Any
    ) -> str | None:
        if operation == "IMPORT_NAME":
            return None if _is_a_library(name) else name or "import"  # of its own package
        if operation == _PATTERN:
            kinds = [*type(host).__mro__, *type(self.module).__mro__]
            names_there = {*self.weights, *(n for kind in kinds for n in vars(kind)), *vars(self.module)}
            matching = (n for n in names_there if re.fullmatch(name, n) and not n.startswith("__"))
            return next(filter(None, (self._by_attribute(n, h) for n in matching for h in (host, self.module))), None)
        if operation not in _OF_GLOBALS:
            return self._by_attribute(name, host) or self._by_attribute(name, self.module)
        used = function.__globals__.get(name)
        if isinstance(used, ModuleType):
            return None if _is_a_library(used.__name__) else name
        if callable(used):
            return self.reaches(used, host)
        if _is_of_a_library(type(used)):
            return None
        return next(filter(None, (self._by_attribute(called, used) for _, called in names)), None)

    def _by_attribute(self, name: str, host: Any) -> str | None:
        if name in self.weights:
            return name
        found = [vars(kind)[name] for kind in type(host).__mro__ if name in vars(kind)]
        reached = (self.reaches(code, host) for code in map(_code_of, found) if code is not None)
        if found or name not in getattr(host, "__dict__", ()):
            return next(filter(None, reached), None)
        return self._by_value(vars(host)[name], name, host)

    def _by_value(self, value: Any, name: str, host: Any) -> str | None:
        if isinstance(value, FunctionType):
            return self.reaches(value, host)
        if isinstance(value, MethodType):
            return self.reaches(value, value.__self__)
        if isinstance(value, partial):
            given = [*value.args, *value.keywords.values()]
            return (name if not _has_no_weights(given) else None) or self._by_value(value.func, name, host)
        return None if _has_no_weights(value) else name


def _code_of(method: Any) -> Any:
    """The function behind what a class has under a name; None: there is none."""
    if isinstance(method, property):
        return method.fget
    if isinstance(method, (cached_property, partialmethod)):
        return method.func
    is_code = isinstance(method, (FunctionType, staticmethod, classmethod)) or hasattr(method, "__wrapped__")
    return method if is_code else None


def _is_filled(cell: Any) -> bool:
    try:
        return not isinstance(cell.cell_contents, type)  # super() captures the class
    except ValueError:
        return False


def _names(code: CodeType) -> Iterator[tuple[str, str]]:
    """What `code` does, and to which attribute or global, also in functions inside it.

    Of `getattr` with a name in the code, that name is an attribute; with an f-string it is a pattern of names.
    """
    instructions = list(dis.get_instructions(code))
    for number, found in enumerate(instructions):
        if found.opcode not in dis.hasname:
            continue
        is_getattr = (found.opname, found.argval) == ("LOAD_GLOBAL", "getattr")
        named = _named(instructions[number + 1 :]) if is_getattr else None
        yield named or (found.opname, found.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _texts(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _texts(constant)
        elif isinstance(constant, str):
            yield constant


def _named(instructions: list[dis.Instruction]) -> tuple[str, str] | None:
    """What `getattr` is given as name, in the instructions behind its own; None: it is not known.

    Known is one text, or one f-string, behind an object that is given by names alone. A default may follow.
    """
    steps = [step for step in instructions if step.opname not in ("PUSH_NULL", "CACHE", "PRECALL", "EXTENDED_ARG")]
    end = next((n for n, step in enumerate(steps) if not step.opname.startswith(_SIMPLE)), len(steps))
    loads = steps[:end]  # up to what is neither a load nor a part of an f-string
    begin = next((n for n, step in enumerate(loads) if n and not step.opname.startswith("LOAD_ATTR")), len(loads))
    rest = loads[begin:]
    is_call = end < len(steps) and steps[end].opname.startswith("CALL")
    has_spec = any(
        step.opname == "FORMAT_WITH_SPEC" or (step.opname == "FORMAT_VALUE" and step.argval[1]) for step in rest
    )
    if not is_call or not rest or has_spec or loads[0].opname.count("LOAD_FAST") > 1:  # one that loads object and name
        return None
    if any(step.opname == "BUILD_STRING" for step in rest):
        pieces = rest[: next(n for n, step in enumerate(rest) if step.opname == "BUILD_STRING")]
        texts = (".*" if step.opname.startswith("FORMAT_") else re.escape(step.argval)
                 for step in pieces if step.opname.startswith("FORMAT_") or (isinstance(step.argval, str)
                 and step.opname == "LOAD_CONST"))  # fmt: skip
        return _PATTERN, "".join(texts)
    first = rest[0]
    is_text = first.opname == "LOAD_CONST" and isinstance(first.argval, str)
    values = [step for step in rest if step.opname != "LOAD_ATTR"]
    return ("LOAD_ATTR", first.argval) if is_text and len(values) <= 2 else None


def _is_of_a_library(function: Any) -> bool:
    return _is_a_library(str(getattr(function, "__module__", "")))


def _is_a_library(name: str) -> bool:
    return name.partition(".")[0] in _LIBRARIES


def _has_no_weights(value: Any) -> bool:
    """Whether `value` has no weights in it now."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple, set)):
        return all(_has_no_weights(item) for item in value)
    if isinstance(value, (nn.Parameter, FunctionType, MethodType, partial)):
        return False
    if is_dataclass(value) and not any(map(_code_of, _own_members(type(value)))):  # it is data alone
        return all(_has_no_weights(getattr(value, field.name, None)) for field in fields(value))
    return isinstance(value, (*_NO_WEIGHTS, Tensor)) or (
        _is_of_a_library(type(value)) and not isinstance(value, nn.Module)
    )


def _own_members(kind: type) -> Iterator[Any]:
    return (member for one in kind.__mro__ for name, member in vars(one).items() if not name.startswith("__"))
