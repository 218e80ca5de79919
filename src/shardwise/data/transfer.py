"""Copies batches from the host to the device."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from shardwise import accelerator
from shardwise.parallel.precision import map_tensors

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class BatchTransfer:
    """Copies batches to the device. A large batch is copied while the device still works on the last step.

    `hosts`: the module and its data, which may override Lightning's hooks for this.
    """

    def __init__(self, device: torch.device, *hosts: Any) -> None:
        self.device = device
        self._hooks = {name for name in _HOOKS for host in hosts if is_overridden(name, host)}
        self._copies: accelerator.Stream | None = None

    def copy(self, batch: Any) -> Any:
        """Copy the tensors of a batch to the device, unless the module or its data copies them itself."""
        if not accelerator.has_streams(self.device) or "transfer_batch_to_device" in self._hooks:
            return batch
        tensors: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            copied = tensor if tensor.device.type != "cpu" else tensor.to(self.device, non_blocking=True)
            tensors.append(copied)
            return copied

        if _is_plain(batch) and _is_small_and_pinned(batch):
            return map_tensors(copy, batch)
        self._copies = self._copies or accelerator.new_stream(self.device)
        computing = accelerator.current_stream(self.device)
        with accelerator.in_stream(self._copies):
            batch = map_tensors(copy, batch)
        for tensor in tensors:
            tensor.record_stream(computing)
        computing.wait_stream(self._copies)
        return batch

    def leaves_work(self, batch: Any) -> bool:
        """Whether Lightning must still call a hook of the user's, or move objects that are no tensors.

        It leaves tensors alone that are on the device already.
        """
        return bool(self._hooks) or not _is_plain(batch)


def _is_small_and_pinned(batch: Any) -> bool:
    """Whether a copy on the device's main stream is best: it takes less time than the host needs for a second stream.

    From memory that is not pinned, the host would wait for the copy.
    """
    tensors = [batch] if isinstance(batch, Tensor) else list(batch.values() if isinstance(batch, dict) else batch)
    return sum(t.nbytes for t in tensors) < 2**20 and all(t.device.type != "cpu" or t.is_pinned() for t in tensors)


def _is_plain(batch: Any) -> bool:
    """Whether the batch is a tensor, or a list, tuple or dict of tensors, so that no other objects must be moved."""
    if isinstance(batch, (list, tuple)):
        return all(isinstance(item, Tensor) for item in batch)
    return isinstance(batch, Tensor) or (type(batch) is dict and all(isinstance(v, Tensor) for v in batch.values()))
