"""A batch, on its way from the host to the device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def _is_small_and_pinned(batch: Any) -> bool:
    """Its copy would keep the device for less time than another stream takes the host; pageable memory would make the
    host wait for the stream."""
    tensors = [batch] if isinstance(batch, Tensor) else list(batch.values() if isinstance(batch, dict) else batch)
    return sum(t.nbytes for t in tensors) < 2**20 and all(t.is_cuda or t.is_pinned() for t in tensors)


def _is_plain(batch: Any) -> bool:
    """A tensor, or a list, tuple or mapping of them: nothing that Lightning would have to move in a way of its own."""
    if isinstance(batch, (list, tuple)):
        return all(isinstance(item, Tensor) for item in batch)
    return isinstance(batch, Tensor) or (type(batch) is dict and all(isinstance(v, Tensor) for v in batch.values()))
