"""What a module, its data and callbacks put into a checkpoint, as values that `torch.load(weights_only=True)` reads.

Plain data travels as it is, or as a dict that says under `KIND` what it was, and comes back as the same type. What is
not plain data is pickled, each key by itself, for a file of its own that is read only where the user trusts it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import io
import pathlib
import pickle
import sys
import types
import zoneinfo
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

KIND = "shardwise:kind"
PLAIN = (
    "plain data: numbers, text, dates, paths, enums, tensors, NumPy arrays, and lists, dicts, sets and dataclasses of "
    "them"
)

SHARD = "a shard of a torch.Tensor"  # which is not plain data, and is pickled by nobody

_AS_IS = (types.NoneType, bool, float, complex, str, torch.Size, torch.dtype, torch.device)
_FACTORIES = {f.__name__: f for f in (bool, int, float, complex, str, bytes, list, tuple, dict, set)}
_PATHS = {p.__name__: p for p in (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath,
                                  pathlib.PureWindowsPath)}  # fmt: skip
_BAGS = {"SimpleNamespace": types.SimpleNamespace, "Namespace": argparse.Namespace}
_LARGE = 2**1000  # larger integers are not read by torch.load

Key = tuple[str, ...]  # where in the checkpoint: ("callbacks", "Mine", "history")


class NotPlainError(Exception):
    """A value that is not plain data, or data of a class that is not there."""

    def __init__(self, value: Any, said: str = "") -> None:
        super().__init__(said or name_of(type(value)))


@dataclass(frozen=True)
class LeftOut:
    """A key whose value is not in the plain part of a checkpoint."""

    key: Key
    kind: str  # the class that is not plain data
    pickled: bool  # it is kept in the file beside

    @property
    def name(self) -> str:
        return ".".join(self.key)

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})"


@dataclass
class Packed:
    """Content of a checkpoint, copied: later changes do not reach it."""

    plain: dict[str, Any] = field(default_factory=dict)
    pickles: dict[Key, bytes] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)

    def __or__(self, other: Packed) -> Packed:
        left_out = [*self.left_out, *other.left_out]
        return Packed(self.plain | other.plain, self.pickles | other.pickles, left_out)


def pack(content: Mapping[str, Any], depths: Mapping[str, int], quiet: tuple[str, ...] = ()) -> Packed:
    """Copy `content`, and take apart what is plain data and what is not.

    `depths`: how many levels of dicts below a top-level key are keys of their own; elsewhere what is not plain data
    takes its whole top-level key with it, so that nobody gets half of a dict. `quiet`: keys under which it is dropped
    without a pickle or a word.
    """
    packed = Packed()
    for name, value in content.items():
        found = _pack(value, (name,), depths.get(name, 0), packed, name in quiet)
        if found is not _LEFT:
            packed.plain[name] = found
    return packed


_LEFT = object()


def _pack(value: Any, key: Key, depth: int, into: Packed, quiet: bool) -> Any:
    if depth and type(value) is dict and KIND not in value and all(type(k) is str for k in value):
        found = {k: _pack(v, (*key, k), depth - 1, into, quiet) for k, v in value.items()}
        return {k: v for k, v in found.items() if v is not _LEFT}
    if depth and type(value) is list and all(type(item) is dict for item in value):
        return [_pack(item, (*key, str(i)), depth - 1, into, quiet) for i, item in enumerate(value)]
    try:
        return encode(value)
    except RecursionError:
        kind = f"{name_of(type(value))} that holds itself"
    except NotPlainError as error:
        kind = str(error)
    if not quiet:
        pickled = _pickle(value)
        if pickled is not None:
            into.pickles[key] = pickled
        into.left_out.append(LeftOut(key, kind, pickled is not None))
    return _LEFT


def write_down(packed: Packed) -> dict[str, Any]:
    """What goes into the plain file."""
    left_out = [(list(left.key), left.kind, left.pickled) for left in packed.left_out]
    return {**packed.plain, KIND: {"left_out": left_out}} if left_out else packed.plain


def unpack(written: dict[str, Any], pickles: Mapping[Key, bytes] | None) -> tuple[dict[str, Any], dict[str, str]]:
    """What was packed, and by key why a value is missing. `pickles`: None where they are not to be read."""
    about = written.pop(KIND, {"left_out": []})
    missing: dict[str, str] = {}
    content = _unpack(written, (), missing)
    for listed, kind, pickled in about["left_out"]:
        key = tuple(listed)
        if not pickled:
            missing[".".join(key)] = f"{kind}: it could not be pickled when it was saved"
        elif pickles is None:
            missing[".".join(key)] = kind
        else:
            try:
                _put(content, key, pickle.loads(pickles[key]))
            except Exception as error:  # of the user's own classes
                missing[".".join(key)] = f"{kind}: {type(error).__name__}: {error}"
    return content, missing


def _unpack(value: Any, key: Key, missing: dict[str, str]) -> Any:
    """A key that cannot be decoded is left out of the dict that it is in."""
    if type(value) is not dict or KIND in value:
        return decode(value)
    found = {}
    for name, item in value.items():
        try:
            found[decode(name)] = _unpack(item, (*key, str(name)), missing)
        except NotPlainError as error:
            missing[".".join((*key, str(name)))] = str(error)
    return found


def _put(content: dict[str, Any], key: Key, value: Any) -> None:
    place: Any = content
    for name in key[:-1]:
        place = place[int(name)] if isinstance(place, list) else place[name]
    place[key[-1]] = value


# One value


def encode(value: Any) -> Any:
    """A copy of `value` as torch.load(weights_only=True) reads it.

    Raises:
        NotPlainError: it is not plain data; names the class that is not.
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
    if issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple) and _is_found(kind):
        return {KIND: "namedtuple", "class": _place(kind), "items": [encode(item) for item in value]}
    if dataclasses.is_dataclass(kind) and _is_bare(kind) and _is_found(kind):
        return {KIND: "dataclass", "class": _place(kind), "attributes": encode(_attributes(value))}
    raise NotPlainError(value, SHARD if isinstance(value, DTensor) else "")


def decode(value: Any) -> Any:
    """What `encode` was given.

    Raises:
        NotPlainError: of a class that no imported module has.
    """
    if type(value) is dict:
        if KIND in value:
            return _DECODERS[value[KIND]](value)
        return {decode(key): decode(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(decode(item) for item in value)
    return value


def name_of(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


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
    """On the host, where a checkpoint is loaded."""
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
    held = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.nbytes else torch.empty(0)
    return {KIND: "array", "dtype": encode(described), "shape": shape, "fortran": fortran, "bytes": held}


def _decode_array(value: dict[str, Any]) -> np.ndarray[Any, Any]:
    dtype = np.lib.format.descr_to_dtype(decode(value["dtype"]))
    held = value["bytes"].numpy().tobytes() if value["bytes"].numel() else b""
    if not held:
        return np.empty(value["shape"], dtype)
    # A copy: what is made from bytes cannot be written to
    return np.frombuffer(held, dtype).reshape(value["shape"]).copy("F" if value["fortran"] else "C")


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
    if not _is_found(kind) or (not names and not isinstance(value, enum.Flag)):
        raise NotPlainError(value)
    return {KIND: "enum", "class": _place(kind), "names": names}


def _decode_enum(value: dict[str, Any]) -> enum.Enum:
    kind: Any = _find(value["class"], lambda found: issubclass(found, enum.Enum))
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
    kind = _find(value["class"], lambda k: issubclass(k, tuple) and isinstance(getattr(k, "_fields", None), tuple))
    if len(value["items"]) != len(kind._fields):
        raise NotPlainError(None, f"{name_of(kind)}, which has other fields now")
    return tuple.__new__(kind, [decode(item) for item in value["items"]])


def _decode_dataclass(value: dict[str, Any]) -> Any:
    """Made without running any code of the class."""
    kind = _find(value["class"], lambda found: dataclasses.is_dataclass(found) and _is_bare(found))
    made = object.__new__(kind)
    for name, item in decode(value["attributes"]).items():
        try:
            object.__setattr__(made, name, item)
        except AttributeError:
            raise NotPlainError(None, f"{name_of(kind)}, which has no attribute {name} any more") from None
    return made


def _attributes(value: Any) -> dict[str, Any]:
    """Of an object: those in its dict, and those in slots."""
    slots = [slot for k in type(value).__mro__ for slot in _slots(k) if slot not in ("__dict__", "__weakref__")]
    return {slot: getattr(value, slot) for slot in slots if hasattr(value, slot)} | dict(getattr(value, "__dict__", {}))


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_bare(kind: type) -> bool:
    """Its attributes are all there is to it: it is no dict or list with fields, and has no way of its own to pickle."""
    own = {name for k in kind.__mro__[:-1] for name in vars(k)}
    # The dataclass decorator writes both of these for frozen classes with slots
    generated = {"__getstate__", "__setstate__"} if "__slots__" in vars(kind) else set()
    pickling = {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"} - generated
    made_by: Any = kind.__new__
    return made_by is object.__new__ and not own & pickling


def _place(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_found(kind: type) -> bool:
    try:
        return _find(_place(kind), lambda found: True) is kind
    except NotPlainError:
        return False


def _find(place: str, fits: Callable[[type], bool]) -> Any:
    """A class by name, among what is imported already: nothing is imported for a checkpoint."""
    module, _, name = place.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if not isinstance(found, type) or not fits(found):
        raise NotPlainError(None, f"{module}.{name}, which no imported module has")
    return found


_ENCODERS: dict[type, Callable[[Any], Any]] = {
    int: _encode_int,
    bytes: lambda value: value or {KIND: "no bytes"},  # torch.load knows no empty ones
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


class _Pickler(pickle.Pickler):
    """Tensors on the host, where it is read there may be no GPU; and nothing of what a strategy has put on objects."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, DTensor) or hasattr(value, "ds_tensor"):
            raise pickle.PicklingError("one rank's shard would come back as the whole")
        if isinstance(value, Tensor) and (value.is_cuda or value._backward_hooks):
            bare: Any = value.detach().cpu()
            if isinstance(value, nn.Parameter):
                bare = nn.Parameter(bare, value.requires_grad)
            return bare.requires_grad_(value.requires_grad).__reduce_ex__(5)
        if isinstance(value, nn.Module):
            reduced: Any = value.__reduce_ex__(5)
            make, arguments, state, *rest = reduced
            return make, arguments, _without_strategy(state) if isinstance(state, dict) else state, *rest
        return NotImplemented


def _without_strategy(state: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module without the hooks and functions that DeepSpeed or this package has set on it."""
    bare: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, dict):  # hooks, parameters, buffers, modules, in a dict that may be DeepSpeed's
            kept = collections.OrderedDict((key, item) for key, item in value.items() if not _is_of_a_strategy(item))
            bare[name] = kept if _is_of_a_strategy(value) or len(kept) < len(value) else value
        elif not _is_of_a_strategy(value):
            bare[name] = value
    return bare


def _is_of_a_strategy(value: Any) -> bool:
    where = str(getattr(value, "__module__", "")).partition(".")[0]
    return where in ("deepspeed", "shardwise") and not isinstance(value, nn.Module)


def _pickle(value: Any) -> bytes | None:
    """None: it cannot be pickled, for whatever reason its classes have."""
    held = io.BytesIO()
    try:
        _Pickler(held, 5).dump(value)
    except Exception:
        return None
    return held.getvalue()
