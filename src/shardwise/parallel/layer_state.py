"""What a layer keeps from call to call in buffers and attributes, so that it can be computed again from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Slot = tuple[dict[str, Any], str]  # where a value is: a dictionary of a module, and the name in it


class _Found(NamedTuple):
    slot: Slot
    value: Any
    version: int | None
    copy: Any


def own_attributes(unit: nn.Module) -> list[Slot]:
    """The attributes that a layer's author has given it, and no engine yet: such as counters, and tensors beside the
    buffers. PyTorch's own layers keep nothing there."""
    usual = vars(nn.Module()).keys()
    modules = [module for module in unit.modules() if not type(module).__module__.startswith("torch.nn.")]
    return [(vars(module), name) for module in modules for name in vars(module).keys() - usual]


class LayerState:
    """The state of a layer as one forward pass has found it.

    Tensors are copied before the forward pass, and those that it has written to or replaced are kept until the layer is
    computed again, which works on copies too. BatchNorm's kernel does not show (by `_version`) that it writes to its
    averages; what it computes in training does not depend on them. What changes within a list is not seen.
    """

    def __init__(self, unit: nn.Module, own: list[Slot]) -> None:
        self.unit, self.own = unit, own
        self._found: list[_Found] = []
        self._changed: list[_Found] = []
        self._present: list[tuple[Slot, Any]] = []

    def watch(self) -> None:
        """Note what there is, before a forward pass."""
        self._found = [_Found(slot, value, _version(value), _copy(value)) for slot, value in self._values()]

    def compare(self) -> None:
        """Keep what the forward pass has changed."""
        self._changed = [
            one for one in self._found
            if one.slot[0].get(one.slot[1]) is not one.value or _version(one.value) != one.version
        ]  # fmt: skip
        self._found = []

    def lend(self) -> None:
        """Give the layer what it had, in copies."""
        self._present = list(self._values())
        for (where, name), value in [*self._present, *((one.slot, one.copy) for one in self._changed)]:
            where[name] = _copy(value)

    def put_back(self) -> None:
        """End what `lend` has begun."""
        for (where, name), value in self._present:
            where[name] = value
        self._present = []

    def has_changed_what_matters(self) -> bool:
        """Whether the forward pass has changed something that the result may depend on, which a BatchNorm or another of
        torch's layers has not. If so, all of it is undone."""
        self.compare()
        torchs = {id(m._buffers) for m in self.unit.modules() if type(m).__module__.startswith("torch.nn.modules.")}
        if all(id(one.slot[0]) in torchs for one in self._changed):
            return False
        for (where, name), value, _, copy in self._changed:
            if _is_state(value):
                with torch.no_grad():
                    value.copy_(copy)
            where[name] = value
        return True

    def _values(self) -> Iterator[tuple[Slot, Any]]:
        buffers = ((module._buffers, name) for module in self.unit.modules() for name in module._buffers)
        return ((slot, slot[0][slot[1]]) for slot in [*buffers, *self.own] if slot[1] in slot[0])


def _is_state(value: Any) -> bool:
    """Whether it is a tensor that a layer may write to: no gradient goes through it."""
    return isinstance(value, Tensor) and not value.requires_grad


def _version(value: Any) -> int | None:
    return value._version if _is_state(value) and not value.is_inference() else None


def _copy(value: Any) -> Any:
    return value.clone() if _is_state(value) else value
