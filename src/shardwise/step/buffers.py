"""The buffers that training writes to, such as the averages of a BatchNorm."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from shardwise.checkpoint.state import persistent_buffers
from shardwise.distributed.collectives import broadcast_from_rank_zero


class BufferKeeper:
    """Copies a module's buffers before each window, so that a step that does not count leaves no trace in them."""

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        # For each dtype: the buffers, and their values before the window.
        self._before: list[tuple[list[Tensor], Tensor]] | None = None

    def keep(self) -> None:
        """Copy the buffers before a window begins."""
        if self._before is None:
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            if self.module.automatic_optimization:
                for _, buffer in persistent_buffers(self.module):
                    by_dtype.setdefault(buffer.dtype, []).append(buffer)
            self._before = [(buffers, torch.empty(0)) for buffers in by_dtype.values()]
        self._before = [(buffers, _in_one_row(buffers)) for buffers, _ in self._before]

    def put_back(self, step_skipped: bool | Tensor) -> None:
        """Restore the buffers if the step was skipped. If only the device knows that, the host does not wait for it."""
        if step_skipped is False or not self._before:
            return
        for buffers, values in self._before:
            if isinstance(step_skipped, Tensor):
                values = torch.where(step_skipped > 0, values, _in_one_row(buffers))
            parts = torch.split(values, [buffer.numel() for buffer in buffers])
            shaped = [part if buffer.ndim == 1 else part.view_as(buffer)
                      for part, buffer in zip(parts, buffers, strict=True)]  # fmt: skip
            with torch.no_grad():
                torch._foreach_copy_(buffers, shaped)

    def synchronize(self, group: dist.ProcessGroup) -> None:
        """Give every rank the buffers of rank 0, before an evaluation and before a save. Collective."""
        with torch.no_grad():
            broadcast_from_rank_zero(list(self.module.buffers()), group)


def _in_one_row(tensors: list[Tensor]) -> Tensor:
    """A model has hundreds of buffers, and most have one dimension: each call for one of them takes the host time."""
    return torch.cat([tensor if tensor.ndim == 1 else tensor.reshape(-1) for tensor in tensors])
