"""Pickles what is not plain data."""

from __future__ import annotations

import collections
import io
import pickle
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


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
