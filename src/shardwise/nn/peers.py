"""Collectives between the ranks that compute a layer together, for autograd and torch.compile.

A rank is one of `Peers`, which all see the same samples and compute the same loss. So a value that each of them has
whole has the same gradient on each, and of a gathered value a rank takes its own part of the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_OPS = torch.ops._c10d_functional
SEQUENCE = -2  # the dim of the sequence in what layers hand over, [..., T, D]


@dataclass
class Between:
    """Along which dim ranks divide what layers hand over, [..., T, D]: the sequence, or the samples, which are first.

    Samples lie one behind the other in memory, so that they are put together without a copy.
    """

    dim: int = SEQUENCE
    is_chosen: bool = False  # in the present batch

    def begin_batch(self) -> None:
        """Let the next pass choose."""
        self.is_chosen = False

    def choose(self, whole: Tensor, ranks: int) -> bool:
        """Divide the samples of `whole`, [N, T, D], if the ranks divide their number, and else its sequences.

        False: an earlier pass of this batch has chosen otherwise, and its layers may be computed again.
        """
        dim = 0 if whole.ndim > 2 and whole.shape[0] % ranks == 0 else SEQUENCE
        if self.is_chosen and dim != self.dim:
            return False
        self.dim, self.is_chosen = dim, True
        return True


@dataclass(frozen=True)
class Peers:
    """A group of ranks by its name, as torch.compile keeps it in a graph, and this rank's place in it.

    `show_dims`: torch's compiler is to exchange beside products, and finds an exchange by the dim that it is along.
    """

    name: str
    rank: int
    size: int
    show_dims: bool = False

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
    along = dim % part.ndim  # torch's compiler knows no negative ones
    is_first = _is_first(part, along, peers)
    rows = (part.flatten(0, along) if is_first else part).contiguous()
    whole: Tensor = _OPS.wait_tensor(_OPS.all_gather_into_tensor(rows, peers.size, peers.name))
    if is_first:
        return whole.view(*part.shape[:along], -1, *part.shape[along + 1 :])
    return torch.cat(whole.chunk(peers.size), along)


def _scattered_sum(whole: Tensor, dim: int, peers: Peers) -> Tensor:
    along = dim % whole.ndim
    is_first = _is_first(whole, along, peers)
    parts = whole.flatten(0, along).contiguous() if is_first else torch.cat(whole.chunk(peers.size, along))
    part: Tensor = _OPS.wait_tensor(_OPS.reduce_scatter_tensor(parts, "sum", peers.size, peers.name))
    return part.view(*whole.shape[:along], -1, *whole.shape[along + 1 :]) if is_first else part


def _is_first(tensor: Tensor, along: int, peers: Peers) -> bool:
    """Whether the dims before `along` are of one: its parts then lie one behind the other, and are not copied."""
    return along == 0 or (not peers.show_dims and math.prod(tensor.shape[:along]) == 1)


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
