"""Collectives over a named group of ranks. In a group of one rank nothing is sent."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def broadcast_from_rank_zero(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite every rank's tensors with the values of the first rank of the group."""
    if group.size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, group_src=0, group=group)


def sum_over(group: dist.ProcessGroup, values: Tensor) -> Tensor:
    """Sum `values` over the group, in place. Does not wait for the device."""
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values


def largest_over(group: dist.ProcessGroup, values: Tensor) -> Tensor:
    """Take the maximum of `values` over the group, in place. Does not wait for the device.

    `values` must not hold a NaN: gloo may give the other ranks' number in its place.
    """
    if group.size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values


def mean_over(group: dist.ProcessGroup, value: Tensor) -> Tensor:
    """The mean over the group, in float64. `value` is not changed. Does not wait for the device."""
    return sum_over(group, value.to(torch.float64, copy=True)) / group.size()


def gather_in_order(group: dist.ProcessGroup, values: Tensor) -> Tensor:
    """Put together the `values` of all ranks, in the order of ranks. Every rank has equally many."""
    if group.size() == 1:
        return values
    whole = values.new_empty(group.size() * values.numel())
    dist.all_gather_into_tensor(whole, values, group=group)
    return whole


def gather_objects(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    """Gather the `value` of every rank of the group, in the order of ranks. None is the group of all ranks."""
    found: list[Any] = [value] * dist.get_world_size(group)
    if len(found) > 1:
        dist.all_gather_object(found, value, group=group)
    return found
