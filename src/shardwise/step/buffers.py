"""Buffers that training writes to, a BatchNorm's averages say: kept, put back, the same on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from shardwise.checkpoint.state import persistent_buffers
from shardwise.distributed.collectives import broadcast_from_rank_zero


class BufferKeeper:
    """Keeps a module's buffers as they are before a window: a step that does not count leaves no trace in them."""

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self._kept: list[tuple[list[Tensor], Tensor]] | None = None  # of one dtype: buffers, and what was in them

    def keep(self) -> None:
        if self._kept is None:
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            if self.module.automatic_optimization:
                for _, buffer in persistent_buffers(self.module):
                    by_dtype.setdefault(buffer.dtype, []).append(buffer)
            self._kept = [(buffers, torch.empty(0)) for buffers in by_dtype.values()]
        self._kept = [(buffers, _in_one_row(buffers)) for buffers, _ in self._kept]

    def put_back(self, step_skipped: bool | Tensor) -> None:
        """Where the step does not count. Does not wait for the device, which may be the only one to know."""
        if step_skipped is False or not self._kept:
            return
        for buffers, before in self._kept:
            if isinstance(step_skipped, Tensor):
                before = torch.where(step_skipped > 0, before, _in_one_row(buffers))
            parts = torch.split(before, [buffer.numel() for buffer in buffers])
            with torch.no_grad():
                torch._foreach_copy_(buffers, [p.view_as(b) for p, b in zip(parts, buffers, strict=True)])

    def synchronize(self, group: dist.ProcessGroup) -> None:
        """One rule everywhere, before buffers are used in an evaluation or saved: rank 0's. Collective."""
        with torch.no_grad():
            broadcast_from_rank_zero(list(self.module.buffers()), group)


def _in_one_row(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
