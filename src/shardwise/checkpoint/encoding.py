"""Encodes plain data as values that `torch.load(weights_only=True)` reads, and decodes them as the same types."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import pathlib
import sys
import types
import zoneinfo
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# The user's classes whose instances are plain data: enums, named tuples, dataclasses.


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


KIND = "shardwise:kind"
PLAIN = (
    "plain data: numbers, text, dates, paths, enums, tensors, NumPy arrays, and lists, dicts, sets and dataclasses of "
    "them"
)
SHARD = "a shard of a torch.Tensor"  # it is neither plain data nor pickled
_AS_IS = (types.NoneType, bool, float, complex, str, torch.Size, torch.dtype, torch.device)
_FACTORIES = {f.__name__: f for f in (bool, int, float, complex, str, bytes, list, tuple, dict, set)}
_PATHS = {p.__name__: p for p in (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath,
                                  pathlib.PureWindowsPath)}  # fmt: skip
_BAGS = {"SimpleNamespace": types.SimpleNamespace, "Namespace": argparse.Namespace}
_LARGE = 2**1000  # larger integers are not read by torch.load


def encode(value: Any) -> Any:
    """A copy of `value` that torch.load(weights_only=True) can read.

    Raises:
        NotPlainError: it is not plain data; the message names the class.
    """
    kind = type(value)
    if kind in _AS_IS:
        return value
    if (encoder := _ENCODERS.get(kind)) is not None:
        return encoder(value)
    if isinstance(value, np.generic):
        return {KIND: "numpy scalar", "array": _encode_array(np.asarray(value))}
    if isinstance(value, enum.Enum):
        return _encode_enum(value)
    if issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple) and can_be_found(kind):
        return {KIND: "namedtuple", "class": dotted_name(kind), "items": [encode(item) for item in value]}
    if dataclasses.is_dataclass(kind) and is_bare(kind) and can_be_found(kind):
        return {KIND: "dataclass", "class": dotted_name(kind), "attributes": encode(attributes_of(value))}
    raise NotPlainError(value, SHARD if isinstance(value, DTensor) else "")


def decode(value: Any) -> Any:
    """The value that `encode` was given.

    Raises:
        NotPlainError: no imported module has its class.
    """
    if type(value) is dict:
        if KIND in value:
            return _DECODERS[value[KIND]](value)
        return {decode(key): decode(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(decode(item) for item in value)
    return value


def _encode_int(value: int) -> Any:
    return value if -_LARGE < value < _LARGE else {KIND: "int", "hex": hex(value)}


def _encode_list(value: list[Any]) -> list[Any]:
    return [encode(item) for item in value]


def _encode_tuple(value: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(encode(item) for item in value)


def _encode_dict(value: dict[Any, Any]) -> dict[Any, Any]:
    keys = {key: encode(key) for key in value}
    if KIND not in value and all(encoded is key for key, encoded in keys.items()):
        return {keys[key]: encode(item) for key, item in value.items()}
    return {KIND: "dict", "items": _pairs(value)}


def _pairs(value: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    return [(encode(key), encode(item)) for key, item in value.items()]


def _encode_default(value: collections.defaultdict[Any, Any]) -> dict[str, Any]:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        raise NotPlainError(value, f"collections.defaultdict of {name or factory}")
    return {KIND: "defaultdict", "factory": name, "items": _pairs(value)}


def _encode_tensor(value: Tensor) -> Tensor:
    """A copy on the host, where a checkpoint is loaded."""
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise NotPlainError(value, f"torch.Tensor ({value.layout}{', quantized' * value.is_quantized})")
    copied = value.detach().resolve_conj().resolve_neg().cpu().clone()
    return nn.Parameter(copied, value.requires_grad) if type(value) is nn.Parameter else copied.requires_grad_(
        value.requires_grad and value.is_leaf
    )  # fmt: skip


def _encode_array(value: np.ndarray[Any, Any]) -> dict[str, Any]:
    dtype, shape = value.dtype, list(value.shape)
    fortran = bool(value.flags.f_contiguous and not value.flags.c_contiguous)
    if dtype.kind == "O":
        items = [encode(item) for item in value.ravel()]
        return {KIND: "array of objects", "shape": shape, "fortran": fortran, "items": items}
    described = np.lib.format.dtype_to_descr(dtype) if not dtype.hasobject else None
    if described is None or np.lib.format.descr_to_dtype(described) != dtype:
        raise NotPlainError(value, f"numpy.ndarray of {dtype}")
    content = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.nbytes else torch.empty(0)
    return {KIND: "array", "dtype": encode(described), "shape": shape, "fortran": fortran, "bytes": content}


def _decode_array(value: dict[str, Any]) -> np.ndarray[Any, Any]:
    dtype = np.lib.format.descr_to_dtype(decode(value["dtype"]))
    content = value["bytes"].numpy().tobytes() if value["bytes"].numel() else b""
    if not content:
        return np.empty(value["shape"], dtype)
    # It is copied, since an array that is made from bytes cannot be written to
    return np.frombuffer(content, dtype).reshape(value["shape"]).copy("F" if value["fortran"] else "C")


def _decode_objects(value: dict[str, Any]) -> np.ndarray[Any, Any]:
    flat = np.empty(len(value["items"]), object)
    for i, item in enumerate(value["items"]):
        flat[i] = decode(item)
    return flat.reshape(value["shape"]).copy("F" if value["fortran"] else "C")


def _encode_enum(value: enum.Enum) -> dict[str, Any]:
    kind = type(value)
    names = [name for name, member in kind.__members__.items() if member is value][:1]
    if not names and isinstance(value, enum.Flag):
        names = [str(member.name) for member in value]
    if not can_be_found(kind) or (not names and not isinstance(value, enum.Flag)):
        raise NotPlainError(value)
    return {KIND: "enum", "class": dotted_name(kind), "names": names}


def _decode_enum(value: dict[str, Any]) -> enum.Enum:
    kind: Any = find_class(value["class"], lambda found: issubclass(found, enum.Enum))
    try:
        members = [kind.__members__[name] for name in value["names"]]
    except KeyError as error:
        raise NotPlainError(None, f"{name_of(kind)}, which has no member {error} any more") from None
    if not members:
        return kind(0)  # type: ignore[no-any-return] # a flag with nothing set
    found = members[0]
    for member in members[1:]:
        found |= member
    return found  # type: ignore[no-any-return]


def _encode_datetime(value: datetime.datetime) -> dict[str, Any]:
    naive = value.replace(tzinfo=None, fold=0)
    return {KIND: "datetime", "iso": naive.isoformat(), "fold": value.fold, "zone": encode(value.tzinfo)}


def _decode_datetime(value: dict[str, Any]) -> datetime.datetime:
    naive = datetime.datetime.fromisoformat(value["iso"])
    return naive.replace(fold=value["fold"], tzinfo=decode(value["zone"]))


def _encode_time(value: datetime.time) -> dict[str, Any]:
    naive = value.replace(tzinfo=None, fold=0)
    return {KIND: "time", "iso": naive.isoformat(), "fold": value.fold, "zone": encode(value.tzinfo)}


def _decode_time(value: dict[str, Any]) -> datetime.time:
    naive = datetime.time.fromisoformat(value["iso"])
    return naive.replace(fold=value["fold"], tzinfo=decode(value["zone"]))


def _encode_delta(value: datetime.timedelta) -> dict[str, Any]:
    return {KIND: "timedelta", "days, seconds, microseconds": [value.days, value.seconds, value.microseconds]}


def _encode_zone(value: datetime.timezone) -> dict[str, Any]:
    return {KIND: "timezone", "arguments": [_encode_delta(item) if isinstance(item, datetime.timedelta) else item
                                            for item in value.__getinitargs__()]}  # type: ignore[attr-defined] # fmt: skip


def _encode_zone_name(value: zoneinfo.ZoneInfo) -> dict[str, Any]:
    if value.key is None:
        raise NotPlainError(value)
    return {KIND: "zone", "key": value.key}


def _decode_tuple(value: dict[str, Any]) -> Any:
    kind = find_class(value["class"], lambda k: issubclass(k, tuple) and isinstance(getattr(k, "_fields", None), tuple))
    if len(value["items"]) != len(kind._fields):
        raise NotPlainError(None, f"{name_of(kind)}, which has other fields now")
    return tuple.__new__(kind, [decode(item) for item in value["items"]])


def _decode_dataclass(value: dict[str, Any]) -> Any:
    """Make the instance without running any code of its class."""
    kind = find_class(value["class"], lambda found: dataclasses.is_dataclass(found) and is_bare(found))
    made = object.__new__(kind)
    for name, item in decode(value["attributes"]).items():
        try:
            object.__setattr__(made, name, item)
        except AttributeError:
            raise NotPlainError(None, f"{name_of(kind)}, which has no attribute {name} any more") from None
    return made


_ENCODERS: dict[type, Callable[[Any], Any]] = {
    int: _encode_int,
    bytes: lambda value: value or {KIND: "no bytes"},  # torch.load cannot read empty bytes
    bytearray: lambda value: {KIND: "bytearray", "bytes": encode(bytes(value))},
    list: _encode_list,
    tuple: _encode_tuple,
    dict: _encode_dict,
    set: lambda value: {KIND: "set", "items": [encode(item) for item in value]},
    frozenset: lambda value: {KIND: "frozenset", "items": [encode(item) for item in value]},
    collections.OrderedDict: lambda value: {KIND: "OrderedDict", "items": _pairs(value)},
    collections.Counter: lambda value: {KIND: "Counter", "items": _pairs(value)},
    collections.defaultdict: _encode_default,
    collections.deque: lambda value: {KIND: "deque", "items": [encode(i) for i in value], "maxlen": value.maxlen},
    range: lambda value: {KIND: "range", "arguments": [value.start, value.stop, value.step]},
    slice: lambda value: {KIND: "slice", "arguments": [encode(value.start), encode(value.stop), encode(value.step)]},
    Tensor: _encode_tensor,
    nn.Parameter: _encode_tensor,
    np.ndarray: _encode_array,
    datetime.datetime: _encode_datetime,
    datetime.date: lambda value: {KIND: "date", "iso": value.isoformat()},
    datetime.time: _encode_time,
    datetime.timedelta: _encode_delta,
    datetime.timezone: _encode_zone,
    zoneinfo.ZoneInfo: _encode_zone_name,
    **{kind: lambda value: {KIND: "path", "class": type(value).__name__, "path": str(value)}
       for kind in _PATHS.values()},
    **{kind: lambda value: {KIND: "namespace", "class": type(value).__name__, "attributes": encode(vars(value))}
       for kind in _BAGS.values()},
}  # fmt: skip
_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "int": lambda value: int(value["hex"], 16),
    "no bytes": lambda value: b"",
    "bytearray": lambda value: bytearray(decode(value["bytes"])),
    "dict": lambda value: dict(decode(value["items"])),
    "set": lambda value: set(decode(value["items"])),
    "frozenset": lambda value: frozenset(decode(value["items"])),
    "OrderedDict": lambda value: collections.OrderedDict(decode(value["items"])),
    "Counter": lambda value: collections.Counter(dict(decode(value["items"]))),
    "defaultdict": lambda value: collections.defaultdict(_FACTORIES.get(value["factory"]), decode(value["items"])),
    "deque": lambda value: collections.deque(decode(value["items"]), value["maxlen"]),
    "range": lambda value: range(*value["arguments"]),
    "slice": lambda value: slice(*decode(value["arguments"])),
    "numpy scalar": lambda value: _decode_array(value["array"])[()],
    "array": _decode_array,
    "array of objects": _decode_objects,
    "datetime": _decode_datetime,
    "date": lambda value: datetime.date.fromisoformat(value["iso"]),
    "time": _decode_time,
    "timedelta": lambda value: datetime.timedelta(*value["days, seconds, microseconds"]),
    "timezone": lambda value: datetime.timezone(*decode(value["arguments"])),
    "zone": lambda value: zoneinfo.ZoneInfo(value["key"]),
    "path": lambda value: _PATHS[value["class"]](value["path"]),
    "namespace": lambda value: _BAGS[value["class"]](**decode(value["attributes"])),
    "enum": _decode_enum,
    "namedtuple": _decode_tuple,
    "dataclass": _decode_dataclass,
}
