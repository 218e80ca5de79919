"""A batch, on its way from the host to the device."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from shardwise.parallel.precision import map_tensors

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class BatchTransfer:
    """Copies batches to the device; a large one while that still works on the step before.

    `hosts`: the module and its data, whose own hooks for this are called.
    """

    def __init__(self, device: torch.device, *hosts: Any) -> None:
        self.device = device
        self._hooks = {name for name in _HOOKS for host in hosts if is_overridden(name, host)}
        self._copies: torch.cuda.Stream | None = None

    def copy(self, batch: Any) -> Any:
        """The tensors of a batch on the device, unless the module or its data copies them itself."""
        if self.device.type != "cuda" or "transfer_batch_to_device" in self._hooks:
            return batch
        tensors: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            copied = tensor if tensor.is_cuda else tensor.to(self.device, non_blocking=True)
            tensors.append(copied)
            return copied

        if _is_plain(batch) and _is_small_and_pinned(batch):
            return map_tensors(copy, batch)
        self._copies = self._copies or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        computing = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copies):
            batch = map_tensors(copy, batch)
        for tensor in tensors:
            tensor.record_stream(computing)
        computing.wait_stream(self._copies)
        return batch

    def leaves_work(self, batch: Any) -> bool:
        """Whether Lightning has something left to do: a hook of the user's, or objects of other kinds in the batch.
        Tensors that are on the device already stay as they are."""
        return bool(self._hooks) or not _is_plain(batch)


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
