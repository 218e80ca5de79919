"""Collectives between the ranks that compute a layer together, for autograd and torch.compile.

A rank is one of `Peers`, which all see the same samples and compute the same loss. So a value that each of them has
whole has the same gradient on each, and of a gathered value a rank takes its own part of the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_OPS = torch.ops._c10d_functional


@dataclass(frozen=True)
class Peers:
    """A group of ranks by its name, as torch.compile keeps it in a graph, and this rank's place in it."""

    name: str
    rank: int
    size: int

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """Put the equal parts of all ranks together along `dim`; the gradients of all ranks are summed."""
        gathered: Tensor = _Gather.apply(part, dim, self)  # type: ignore[no-untyped-call]
        return gathered

    def scatter_sum(self, whole: Tensor, dim: int) -> Tensor:
        """Sum over the ranks, and give each rank its part along `dim`, which the number of ranks divides."""
        part: Tensor = _ScatterSum.apply(whole, dim, self)  # type: ignore[no-untyped-call]
        return part

    def gather_copies(self, part: Tensor) -> Tensor:
        """[...] -> [size, ...] of which every rank computes the same: its gradient is that of its own part."""
        gathered: Tensor = _GatherCopies.apply(part, self)  # type: ignore[no-untyped-call]
        return gathered

    def copies(self, whole: Tensor) -> Tensor:
        """`whole`, which every rank has, for layers of which each rank has a part: the gradients of all are summed."""
        same: Tensor = _Copies.apply(whole, self)  # type: ignore[no-untyped-call]
        return same

    def sum_copies(self, part: Tensor) -> Tensor:
        """Sum over the ranks, of which every rank goes on to compute the same: its gradient is that of the sum."""
        total: Tensor = _SumCopies.apply(part, self)  # type: ignore[no-untyped-call]
        return total

    def reduce(self, values: Tensor, how: str) -> Tensor:
        """The "sum" or "max" over the ranks, without a gradient."""
        reduced: Tensor = _OPS.wait_tensor(_OPS.all_reduce(values.contiguous(), how, self.name))
        return reduced


def share_of(number: int, ranks: int, rank: int) -> tuple[int, int]:
    """Where the part of `rank` begins and how long it is, if `number` rows are divided; the first ones have one more.

    It is not torch.chunk's cut, which leaves nothing for the last rank of 5 rows over 4.
    """
    each, more = divmod(number, ranks)
    return rank * each + min(rank, more), each + (rank < more)


def _gathered(part: Tensor, dim: int, peers: Peers) -> Tensor:
    whole: Tensor = _OPS.wait_tensor(_OPS.all_gather_into_tensor(part.contiguous(), peers.size, peers.name))
    along = dim % part.ndim  # torch's compiler finds a gather before a product by a dim that is not negative
    return whole if along == 0 else torch.cat(whole.chunk(peers.size), along)


def _scattered_sum(whole: Tensor, dim: int, peers: Peers) -> Tensor:
    along = dim % whole.ndim
    parts = whole if along == 0 else torch.cat(whole.chunk(peers.size, along))
    part: Tensor = _OPS.wait_tensor(_OPS.reduce_scatter_tensor(parts.contiguous(), "sum", peers.size, peers.name))
    return part


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, peers: Peers) -> Tensor:
        ctx.along, ctx.among = dim, peers
        return _gathered(part, dim, peers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _scattered_sum(gradient, ctx.along, ctx.among), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, peers: Peers) -> Tensor:
        ctx.along, ctx.among = dim, peers
        return _scattered_sum(whole, dim, peers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(gradient, ctx.along, ctx.among), None, None


class _GatherCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, peers: Peers) -> Tensor:
        ctx.among = peers
        return _gathered(part.unsqueeze(0), 0, peers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.among.rank], None


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, peers: Peers) -> Tensor:
        ctx.among = peers
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.among.reduce(gradient, "sum"), None


class _SumCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, peers: Peers) -> Tensor:
        return peers.reduce(part, "sum")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
