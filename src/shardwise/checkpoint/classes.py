"""The user's classes whose instances are plain data: enums, named tuples, dataclasses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def attributes_of(value: Any) -> dict[str, Any]:
    """An object's attributes, those in its `__dict__` and those in slots."""
    slots = [slot for k in type(value).__mro__ for slot in _slots(k) if slot not in ("__dict__", "__weakref__")]
    return {slot: getattr(value, slot) for slot in slots if hasattr(value, slot)} | dict(getattr(value, "__dict__", {}))


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def is_bare(kind: type) -> bool:
    """Whether an instance is nothing but its attributes: no dict or list with fields, and no pickling of its own."""
    own = {name for k in kind.__mro__[:-1] for name in vars(k)}
    # The dataclass decorator writes both of these for frozen classes with slots
    generated = {"__getstate__", "__setstate__"} if "__slots__" in vars(kind) else set()
    pickling = {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"} - generated
    made_by: Any = kind.__new__
    return made_by is object.__new__ and not own & pickling


def dotted_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def can_be_found(kind: type) -> bool:
    try:
        return find_class(dotted_name(kind), lambda found: True) is kind
    except NotPlainError:
        return False


def find_class(path: str, fits: Callable[[type], bool]) -> Any:
    """Find a class by its name, as `dotted_name` gives it, in modules that are imported already.

    Nothing is imported for a checkpoint.
    """
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if not isinstance(found, type) or not fits(found):
        raise NotPlainError(None, f"{module}.{name}, which no imported module has")
    return found


class NotPlainError(Exception):
    """A value is not plain data, or its class cannot be found."""

    def __init__(self, value: Any, message: str = "") -> None:
        super().__init__(message or name_of(type(value)))


def name_of(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
