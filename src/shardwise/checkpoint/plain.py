"""Packs what module, data and callbacks put into a checkpoint so that `torch.load(weights_only=True)` reads it.

Plain data is stored as it is, or as a dict that says under `KIND` what it was, and comes back as the same type. What
is not plain data is pickled, each key by itself, into a separate file that is read only where the user trusts it.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.encoding import KIND, PLAIN, NotPlainError, decode, encode, name_of
from shardwise.run_dir.events import without_secrets

Key = tuple[str, ...]  # a path in the checkpoint: ("callbacks", "Mine", "history")


@dataclass(frozen=True)
class LeftOut:
    """A key whose value is not in the plain part of a checkpoint."""

    key: Key
    kind: str  # the class that is not plain data
    pickled: bool  # whether the separate file of pickles has it

    @property
    def name(self) -> str:
        return ".".join(self.key)

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})"


@dataclass
class Packed:
    """A copy of a checkpoint's content: later changes of the originals do not reach it."""

    plain: dict[str, Any] = field(default_factory=dict)
    pickles: dict[Key, bytes] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)

    def __or__(self, other: Packed) -> Packed:
        left_out = [*self.left_out, *other.left_out]
        return Packed(self.plain | other.plain, self.pickles | other.pickles, left_out)


def pack(content: Mapping[str, Any], depths: Mapping[str, int], quiet: tuple[str, ...] = ()) -> Packed:
    """Copy `content`, and separate what is plain data from what is not.

    `depths`: for a top-level key, how many levels of dicts below it are treated as keys of their own. Elsewhere a value
    that is not plain data takes its whole top-level key with it, so that nobody gets half of a dict. `quiet`: top-level
    keys that no run reads. Such a value is dropped there without a pickle or a message, and secrets are hidden.
    """
    packed = Packed()
    for name, value in content.items():
        value = without_secrets(value) if name in quiet else value
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
        pickled = to_pickle(value)
        if pickled is not None:
            into.pickles[key] = pickled
        into.left_out.append(LeftOut(key, kind, pickled is not None))
    return _LEFT


def write_down(packed: Packed) -> dict[str, Any]:
    """The content of the file that holds plain data alone."""
    left_out = [(list(left.key), left.kind, left.pickled) for left in packed.left_out]
    return {**packed.plain, KIND: {"left_out": left_out}} if left_out else packed.plain


def unpack(written: dict[str, Any], pickles: Mapping[Key, bytes] | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The content that was packed, and by key why a value is missing.

    `pickles`: None where the user does not trust the file of pickles.
    """
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
            except Exception as error:  # the user's own classes may raise anything
                missing[".".join(key)] = f"{kind}: {type(error).__name__}: {error}"
    return content, missing


def _unpack(value: Any, key: Key, missing: dict[str, str]) -> Any:
    """Decode dicts key by key. A key that cannot be decoded is left out of its dict and listed in `missing`."""
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
    container: Any = content
    for name in key[:-1]:
        container = container[int(name)] if isinstance(container, list) else container[name]
    container[key[-1]] = value


def describe_left_out(left_out: list[LeftOut]) -> str:
    """The message that tells the user which keys are not plain data."""
    pickled = [str(left) for left in left_out if left.pickled]
    lost = [str(left) for left in left_out if not left.pickled]
    parts = []
    if pickled:
        parts.append(
            f"{', '.join(pickled)}: not plain data, so it is kept in trainer.unsafe.pkl, a pickle, which is read only "
            f"where trust=true is given; a run that goes on without it does not get it"
        )
    if lost:
        parts.append(f"{', '.join(lost)}: not plain data, and it cannot be pickled: it is left out")
    return f"{'; '.join(parts)} ({PLAIN})"


# Pickles what is not plain data.


class _Pickler(pickle.Pickler):
    """Pickles tensors as tensors of the host, and modules without what a strategy has put on them.

    The machine that reads the pickle may have no GPU.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, DTensor) or hasattr(value, "ds_tensor"):
            raise pickle.PicklingError("one rank's shard would come back as the whole")
        if isinstance(value, Tensor) and (value.device.type != "cpu" or value._backward_hooks):
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
    package = str(getattr(value, "__module__", "")).partition(".")[0]
    return package in ("deepspeed", "shardwise") and not isinstance(value, nn.Module)


def to_pickle(value: Any) -> bytes | None:
    """The pickle of `value`, or None where it cannot be pickled."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, 5).dump(value)
    except Exception:  # a class may raise anything while it is pickled
        return None
    return buffer.getvalue()
