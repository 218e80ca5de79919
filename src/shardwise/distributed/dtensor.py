"""The parts of DTensors that this rank holds, and functions of whole matrices of which it holds some rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

# The parts of DTensors that this rank holds.


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


# They make numbers of Python's out of a tensor. torch does it with this rank's part of a DTensor, or fails.
_READS = ("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__array__", "__format__")


@contextmanager
def reading_whole(whole: Callable[[DTensor], Tensor] = DTensor.full_tensor) -> Iterator[None]:
    """Inside, numbers of Python's that are made out of DTensors are those of whole ones.

    `whole` gathers one, and is collective: every rank reads the same.
    """

    def reading(name: str) -> Callable[..., Any]:
        return lambda tensor, *args, **kwargs: getattr(whole(tensor), name)(*args, **kwargs)

    before = {name: vars(DTensor).get(name) for name in _READS}
    for name in _READS:
        setattr(DTensor, name, reading(name))
    try:
        yield
    finally:
        for name, method in before.items():
            if method is None:
                delattr(DTensor, name)
            else:
                setattr(DTensor, name, method)


@contextmanager
def listing_whole(whole: Callable[[DTensor], Tensor] = DTensor.full_tensor) -> Iterator[None]:
    """Inside, what `torch.tensor` makes of a list of DTensors has the numbers of whole ones; otherwise torch fails.

    Not around what is compiled: dynamo would see another `torch.tensor` each time.
    """

    def numbers(data: Any) -> Any:
        if isinstance(data, (list, tuple)):
            return [numbers(one) for one in data]
        return whole(data) if isinstance(data, DTensor) else data

    make = torch.tensor
    setattr(torch, "tensor", lambda data, *args, **kwargs: make(numbers(data), *args, **kwargs))  # noqa: B010
    try:
        yield
    finally:
        setattr(torch, "tensor", make)  # noqa: B010


# Computes a function of whole matrices of which each rank holds some rows, or a copy.
#
# The ranks of a group divide the matrices among themselves. In each round a rank has one whole matrix, gathered from
# all ranks, and sends every rank its rows of the result. The next round's matrices travel while this round's are
# computed.

Give = Callable[[Tensor], Tensor]
Function = Callable[[Tensor], Tensor]
Take = Callable[[Tensor, Tensor], None]


class ShardedMatrices:
    """The `Matrices` (see optim/matrices.py) of parameters of which each rank holds some rows.

    `wholes`: DTensors that are sharded along their first dimension, over one axis of the mesh. `shards`: the local part
    of each, which the optimizer steps on.
    """

    def __init__(self, wholes: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        self._rows = {id(shard): whole.shape[0] for whole, shard in zip(wholes, shards, strict=True) if whole.ndim}
        groups = {group for whole in wholes for group in shard_groups(whole)}
        assert len(groups) <= 1, "the matrices are sharded over several groups of ranks"
        self._group = groups.pop() if groups else None  # None: every rank has all rows

    def rows(self, parameter: Tensor) -> int:
        return self._rows[id(parameter)]

    def map(self, parameters: list[Tensor], give: Give, function: Function, take: Take) -> None:
        if self._group is None:
            for parameter in parameters:
                take(parameter, function(give(parameter)))
            return
        arriving: _Round | None = None
        returning: _Round | None = None
        for some in [*_rounds(parameters, self.rows, self._group.size()), None]:
            following = None if some is None else _Round(some, self.rows, self._group, give)
            if arriving is not None:
                arriving.compute(function)
                if returning is not None:
                    returning.hand_out(take)
                returning = arriving
            arriving = following
        if returning is not None:
            returning.hand_out(take)


class _Round:
    """One matrix for each rank: rank i of the group computes the i-th. The last round may have fewer."""

    def __init__(
        self, parameters: list[Tensor], rows: Callable[[Tensor], int], group: dist.ProcessGroup, give: Give
    ) -> None:
        self.parameters, self._group = parameters, group
        size, rank = group.size(), group.rank()
        mine = [give(parameter) for parameter in parameters]
        self._shapes = [part.shape for part in mine]
        self._sizes = [part.numel() for part in mine] + [0] * (size - len(mine))
        self._cut, self._columns = [0] * size, 0  # how many elements of this rank's matrix each rank has
        if rank < len(parameters):
            self._columns = mine[rank].shape[1]
            shares = rows_of_ranks(rows(parameters[rank]), size)
            assert shares[rank] == mine[rank].shape[0], "the rows are cut in another way than FSDP2 cuts them"
            self._cut = [share * self._columns for share in shares]
        self._send(torch.cat([part.reshape(-1) for part in mine]), self._sizes, self._cut)

    def _send(self, values: Tensor, sizes: list[int], arriving: list[int]) -> None:
        """Send `sizes` elements to each rank, and receive `arriving` elements of each."""
        self._sent, self._received = values, values.new_empty(sum(arriving))
        self._work: Any = dist.all_to_all_single(
            self._received, values, arriving, sizes, group=self._group, async_op=True
        )

    def compute(self, function: Function) -> None:
        """Compute `function` of this rank's matrix, and begin to send the result."""
        self._work.wait()
        result = self._received
        if self._columns:
            result = function(result.view(-1, self._columns)).reshape(-1)
        self._send(result, self._cut, self._sizes)

    def hand_out(self, take: Take) -> None:
        """Give this rank's rows of every result to `take`."""
        self._work.wait()
        parts = torch.split(self._received, self._sizes[: len(self.parameters)])
        for parameter, part, shape in zip(self.parameters, parts, self._shapes, strict=True):
            take(parameter, part.view(shape))


class CopiedMatrices:
    """The `Matrices` of parameters of which every rank of `group` holds a copy.

    One rank computes the result of a matrix, and all others receive it: so they have the same bits.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def rows(self, parameter: Tensor) -> int:
        return parameter.shape[0]

    def map(self, parameters: list[Tensor], give: Give, function: Function, take: Take) -> None:
        rank = self._group.rank()
        for some in _rounds(parameters, self.rows, self._group.size()):
            sent: list[tuple[Tensor, Any]] = []
            for owner, parameter in enumerate(some):
                matrix = give(parameter)
                result = function(matrix).contiguous() if owner == rank else matrix.new_empty(matrix.shape)
                source = dist.get_global_rank(self._group, owner)
                sent.append((result, dist.broadcast(result, source, group=self._group, async_op=True)))
            for parameter, (result, work) in zip(some, sent, strict=True):
                work.wait()
                take(parameter, result)


def rows_of_ranks(rows: int, ranks: int) -> list[int]:
    """How many rows each rank has, as torch.chunk cuts them."""
    share = -(-rows // ranks)
    return [max(0, min(share, rows - rank * share)) for rank in range(ranks)]


def _rounds(parameters: list[Tensor], rows: Callable[[Tensor], int], size: int) -> list[list[Tensor]]:
    """`size` matrices at a time, alike ones beside each other, so that the ranks of a round take equally long."""
    largest_first = sorted(parameters, key=lambda p: -rows(p) * p.shape[1:].numel())
    return [largest_first[i : i + size] for i in range(0, len(parameters), size)]
