"""Collectives over a named group of ranks. In a group of one rank nothing is sent."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def broadcast_from_rank_zero(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Rank 0's values into everybody's tensors."""
    if group.size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, src=0, group=group)


def sum_over(group: dist.ProcessGroup, values: Tensor) -> Tensor:
    """Into `values`. Does not wait for the device."""
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values


def largest_over(group: dist.ProcessGroup, values: Tensor) -> Tensor:
    """Into `values`. Does not wait for the device."""
    if group.size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values


def mean_over(group: dist.ProcessGroup, value: Tensor) -> Tensor:
    """In float64; `value` stays as it is. Does not wait for the device."""
    return sum_over(group, value.to(torch.float64, copy=True)) / group.size()


def gather_objects(group: dist.ProcessGroup, own: Any) -> list[Any]:
    """What every rank of the group has, in the order of ranks."""
    found: list[Any] = [own] * group.size()
    if group.size() > 1:
        dist.all_gather_object(found, own, group=group)
    return found
