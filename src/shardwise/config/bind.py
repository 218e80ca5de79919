"""Checks values from YAML or a command line, and puts them into the dataclasses of schema.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from shardwise.config.schema import MISSING
from shardwise.errors import ConfigError, did_you_mean

_TAKES = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text", tuple: "a list, e.g. [a,b]",
    dict: "a mapping, e.g. {A: b}",
}  # fmt: skip


def bind(kind: Any, value: Any, key: str = "") -> Any:
    """Convert a plain value from YAML to the schema's type `kind`. Nothing is rounded, cut or dropped.

    Raises:
        ConfigError: a value of another type or that is no choice, an unknown key, or a key without a value.
    """
    if kind is Any:
        return value
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    or_null = NoneType in kinds
    if or_null and value is None:
        return None
    kind, *others = (k for k in kinds if k is not NoneType)
    if type(value) in others:
        return value
    if dataclasses.is_dataclass(kind):
        return _bind_fields(cast(type[Any], kind), value, key)
    if get_origin(kind) is Literal:
        return choose(get_args(kind), value, key)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[choose(list(kind.__members__), value, key)]
    if get_origin(kind) is tuple and isinstance(value, (list, tuple)):
        return tuple(bind(get_args(kind)[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    if get_origin(kind) is dict and isinstance(value, dict):
        return {str(word): bind(get_args(kind)[1], item, f"{key}.{word}") for word, item in value.items()}
    if kind in (int, float) and isinstance(value, str):  # environment variables are text
        try:
            return kind(value)
        except ValueError:
            pass
    if type(value) is kind:
        return value
    if type(value) is int and kind in (float, str):
        return kind(value)
    kind = get_origin(kind) or kind
    remedy = ", or null" if or_null else ""
    if kind is int and isinstance(value, float) and value.is_integer():
        remedy = f"; write {int(value)}"
    elif kind is str and isinstance(value, (float, bool)):
        remedy = f"; quote it: \"{key}='…'\""
    elif kind is tuple:
        remedy += remedy_for_text(value)
    raise ConfigError(f"{key}={as_yaml(value)}: must be {', or '.join(_TAKES[k] for k in (kind, *others))}{remedy}")


def choose(choices: Collection[str], value: Any, key: str) -> str:
    """`value`, if it is one of `choices`."""
    if value is False and "off" in choices:  # so YAML reads `off`
        value = "off"
    if isinstance(value, str) and value in choices:
        return value
    raise ConfigError(f"{key}={as_yaml(value)}: must be one of {', '.join(choices)}{did_you_mean(str(value), choices)}")


def _bind_fields(kind: type[Any], value: Any, key: str) -> Any:
    prefix = f"{key}." if key else ""
    types = get_type_hints(kind)
    if not isinstance(value, dict):
        raise ConfigError(f"{key}={as_yaml(value)}: must be a mapping with {', '.join(types)}")
    for word in value:
        if word not in types:
            near = did_you_mean(str(word), types)
            known = f"; {key} has {', '.join(types)}" if key else "; --help lists what there is"
            raise ConfigError(f"{prefix}{word}: there is no such option{near}{known}")
    for f in dataclasses.fields(kind):
        if value.get(f.name, f.default) == MISSING:
            raise ConfigError(
                f"{prefix}{f.name} has no value, and nothing can be assumed for it: give {prefix}{f.name}=…"
            )
    return kind(**{word: bind(types[word], item, prefix + word) for word, item in value.items()})


def as_yaml(value: Any) -> str:
    """A value as YAML writes it."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(as_yaml, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def as_number(value: Any) -> Any:
    """`value`, with numbers in place of text that is one, in a list too."""
    if isinstance(value, list):
        return [as_number(item) for item in value]
    for kind in (int, float) if isinstance(value, str) else ():
        try:
            return kind(value)
        except ValueError:
            pass
    return value


def remedy_for_text(value: Any) -> str:
    """What to add to a message about text in place of a number or of a list, if it is the text of one."""
    if not isinstance(value, str) or (isinstance(as_number(value), str) and not value.startswith("[")):
        return ""
    return ", and this is text: write it without quotes; the environment's is '${oc.decode:${oc.env:NAME}}', quoted so"


def take_options(words: list[str], is_ours: Callable[[str], bool]) -> tuple[list[str], dict[str, str]]:
    """Split words into those that are left, and the values of those of the form `key=value` whose key is ours.

    Raises:
        ConfigError: a key of ours is given twice.
    """
    rest: list[str] = []
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not is_ours(key):
            rest.append(word)
        elif key in values:
            raise ConfigError(f"{word}: {key}={values[key]} is given already; give it once")
        else:
            values[key] = value
    return rest, values
