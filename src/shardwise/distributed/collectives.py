"""Collectives over named groups of ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def broadcast_from_rank_zero(tensors: list[Tensor]) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)
