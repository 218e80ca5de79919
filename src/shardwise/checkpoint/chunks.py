"""Parts of tensors. Pure arithmetic."""

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
class Box:
    """`values` stand at `offsets` of the whole; their shape is the box's."""

    offsets: tuple[int, ...]
    values: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.values.shape)


@dataclass(frozen=True)
class Spread:
    """A tensor of `shape` of which this rank holds some boxes, or none."""

    shape: tuple[int, ...]
    boxes: list[Box]


def whole(values: Tensor) -> Spread:
    """What every rank holds all of."""
    return Spread(tuple(values.shape), [Box((0,) * values.ndim, values)])


def slice_of(tensor: Tensor, local: Tensor) -> list[Box]:
    """`local`, of the form of this rank's part of `tensor`, which may be a DTensor."""
    if not isinstance(tensor, DTensor):
        return [Box((0,) * local.ndim, local)]
    offsets = _offsets(tensor.shape, tensor.device_mesh, tensor.placements)
    return [Box(offsets, local)] if local.numel() else []


@cache  # of a parameter's moments, and at the next save, the same; and 80 µs each
def _offsets(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[int, ...]:
    return tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[1])


def range_of(shape: tuple[int, ...], start: int, values: Tensor) -> list[Box]:
    """The elements from `start` on, in row-major order, of a tensor of `shape`: at most 2 * ndim - 1 boxes.

    `values` is flat; the boxes share its storage.
    """
    if not shape:
        return [Box((), values.view(()))] if values.numel() else []
    return [Box(offsets, part) for offsets, part in _cut(shape, start, values, ())]


def _cut(
    shape: tuple[int, ...], start: int, values: Tensor, before: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Rows that are there in part, whole rows between them; `before`: where in the dimensions outside."""
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
