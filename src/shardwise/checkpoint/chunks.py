"""Which part of a tensor a rank holds, as chunks: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor: `values` begin at `offsets` of the whole tensor."""

    offsets: tuple[int, ...]
    values: Tensor

    @property
    def bounds(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.values.shape)


@dataclass(frozen=True)
class ChunkedTensor:
    """A tensor of `shape` of which this rank holds some chunks, or none."""

    shape: tuple[int, ...]
    chunks: list[Chunk]


def whole(values: Tensor) -> ChunkedTensor:
    """The chunked form of a tensor that every rank holds whole."""
    return ChunkedTensor(tuple(values.shape), [Chunk((0,) * values.ndim, values)])


def slice_of(tensor: Tensor, local: Tensor, first: tuple[int, int] = (0, 0)) -> list[Chunk]:
    """`local` as a chunk of `tensor`, which may be a DTensor. `local` has the shape of this rank's part of it.

    `first`: a dim, and where `tensor` begins in it, if `tensor` is a part of the whole itself.
    """
    offsets: tuple[int, ...] = (0,) * local.ndim
    if isinstance(tensor, DTensor):
        offsets = _offsets(tensor.shape, tensor.device_mesh, tensor.placements)
        if not local.numel():
            return []
    dim, start = first
    return [Chunk(tuple(o + start * (i == dim) for i, o in enumerate(offsets)), local)]


@cache  # a parameter's moments have the same offsets, as have later saves, and each computation takes 80 µs
def _offsets(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[int, ...]:
    return tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[1])


def range_of(shape: tuple[int, ...], start: int, values: Tensor) -> list[Chunk]:
    """Cut a range of a tensor's elements, in row-major order, into at most 2 * ndim - 1 chunks.

    `values` is flat: the elements from `start` on of a tensor of `shape`. The chunks share its storage.
    """
    if not shape:
        return [Chunk((), values.view(()))] if values.numel() else []
    return [Chunk(offsets, part) for offsets, part in _cut(shape, start, values, ())]


def _cut(
    shape: tuple[int, ...], start: int, values: Tensor, before: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield a first row that is there in part, the whole rows, and a last row in part.

    `before`: the offsets in the dimensions outside of `shape`.
    """
    if not values.numel():
        return
    outer, row = (1,) * len(before), prod(shape[1:])
    first, within = divmod(start, row)
    if within or values.numel() < row:
        many = min(row - within, values.numel())
        yield from _cut(shape[1:], within, values[:many], (*before, first))
        values, first = values[many:], first + 1
    if rows := values.numel() // row:
        offsets = (*before, first, *(0 for _ in shape[1:]))
        yield offsets, values[: rows * row].view(*outer, rows, *shape[1:])
    yield from _cut(shape, (first + rows) * row, values[rows * row :], before)
