"""The parts of DTensors that this rank holds."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this rank holds; any other tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_groups(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups whose ranks hold different parts of `tensor`, without groups of a single rank."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(mesh.get_group(i) for i, p in enumerate(tensor.placements) if p.is_shard() and mesh.size(i) > 1)


def whole_tensor(tensor: Tensor) -> Tensor:
    """Gather a DTensor; any other tensor is returned as it is. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
