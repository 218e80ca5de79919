"""The parts of DTensors that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
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
