"""Lays out the ranks as mesh axes. This is arithmetic alone, without torch and environment."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import product
from math import prod

from shardwise.errors import ConfigError
from shardwise.plan.capabilities import STRATEGIES

AXES = ("pipeline", "replicate", "shard", "context", "tensor")  # outermost first
_OF_MODELS = ("pipeline", "context", "tensor")  # axes whose ranks see the same samples


@dataclass(frozen=True)
class Topology:
    """Nodes × devices as mesh axes. Ranks are numbered node by node, and the last axis varies fastest.

    `replicate`: the number of copies of the parameters. `shard`: the number of ranks that share one copy. Their product
    is the data-parallel size. The ranks of the other axes see the same samples: `context` divides each sequence,
    `tensor` each matrix, and `pipeline` the layers. `tensor` varies fastest, so that it stays inside a node.
    """

    nodes: int
    devices: int
    replicate: int
    shard: int
    context: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks that see different samples."""
        return self.replicate * self.shard

    @property
    def loss_size(self) -> int:
        """The number of ranks among which losses and gradients are averaged: context ranks have parts of samples."""
        return self.data_parallel_size * self.context

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the axes by name, outermost first. `pipeline`, `context` and `tensor` are there if in use."""
        return {axis: getattr(self, axis) for axis in AXES if axis not in _OF_MODELS or getattr(self, axis) > 1}

    @property
    def is_data_parallel_only(self) -> bool:
        """Whether every rank sees samples of its own."""
        return self.world_size == self.data_parallel_size

    def position(self, rank: int) -> dict[str, int]:
        """The number of `rank` on each axis."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return {axis: found[axis] for axis in AXES}

    def data_parallel_rank(self, rank: int) -> int:
        """The number of `rank` among those that see different samples. Peers on the other axes share it."""
        return rank // (self.context * self.tensor) % self.data_parallel_size

    def pipeline_rank(self, rank: int) -> int:
        """The place of `rank` in its pipeline, in the order of the layers.

        Rank 0 has the last one: losses, metrics and logs are then where Lightning has its loggers.
        """
        return self.pipeline - 1 - self.position(rank)["pipeline"]

    def groups(self, axes: Collection[str]) -> list[list[int]]:
        """All ranks, in groups that differ on `axes` alone, each in ascending order."""
        strides = {axis: prod(getattr(self, a) for a in AXES[i + 1 :]) for i, axis in enumerate(AXES)}

        def offsets(of: list[str]) -> list[int]:
            return [sum(place) for place in product(*(range(0, getattr(self, a) * strides[a], strides[a]) for a in of))]

        inside, outside = [a for a in AXES if a in axes], [a for a in AXES if a not in axes]
        return [[begin + offset for offset in offsets(inside)] for begin in offsets(outside)]


def make_topology(
    strategy: str,
    nodes: int,
    devices: int,
    shard_size: int | None = None,
    *,
    context: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
) -> Topology:
    """Lay out `nodes` × `devices` ranks for a strategy.

    `shard_size`, where shards have replicas: ranks that share one copy of the parameters; None means those of one node.
    `context`, `tensor`, `pipeline`: the sizes of these axes.

    Raises:
        ConfigError: sizes that do not divide the ranks, or a hybrid that is no hybrid.
    """
    for word, value in (("nodes", nodes), ("devices", devices)):
        if value < 1:
            raise ConfigError(f"{word}={value}: must be at least 1")
    world_size = nodes * devices
    axes = {"context": context, "tensor": tensor, "pipeline": pipeline}
    data_ranks, does = _data_ranks(nodes, devices, axes), STRATEGIES[strategy]
    if not does.shards:
        return Topology(nodes, devices, replicate=data_ranks, shard=1, **axes)
    if not does.has_replicas:
        return Topology(nodes, devices, replicate=1, shard=data_ranks, **axes)
    in_use = {axis: size for axis, size in axes.items() if size > 1}
    ranks = f"nodes * devices = {world_size}"
    if in_use:
        ranks = f"nodes * devices / ({' * '.join(in_use)}) = {data_ranks}"
    if shard_size is None:
        if nodes == 1 and data_ranks > 1:
            raise ConfigError(
                f"strategy={strategy} on one node needs strategy.shard_size, the ranks that share one copy of the "
                f"parameters: a divisor of {ranks} (one of {_divisors(data_ranks)}); "
                f"strategy=fsdp shards over all of them"
            )
        shard_size = min(data_ranks, max(1, devices // (context * tensor)))
    if shard_size < 1 or data_ranks % shard_size:
        raise ConfigError(
            f"strategy.shard_size={shard_size} does not divide "
            f"{ranks if in_use else f'nodes * devices = {nodes} * {devices} = {world_size}'}; "
            f"use one of {_divisors(data_ranks)}"
        )
    return Topology(nodes, devices, replicate=data_ranks // shard_size, shard=shard_size, **axes)


def _data_ranks(nodes: int, devices: int, axes: dict[str, int]) -> int:
    """The ranks that are left for `replicate` and `shard`."""
    for axis, size in axes.items():
        if size < 1:
            raise ConfigError(f"strategy.{axis}_parallel_size={size}: must be at least 1")
    if devices % axes["tensor"]:
        raise ConfigError(
            f"strategy.tensor_parallel_size={axes['tensor']} does not divide devices={devices}: the ranks of a tensor "
            f"axis are on one node, since they exchange activations in every layer; use one of {_divisors(devices)}, "
            f"or devices= a multiple of it"
        )
    product_of_axes = prod(axes.values())
    if nodes * devices % product_of_axes:
        words = " * ".join(f"strategy.{axis}_parallel_size={size}" for axis, size in axes.items() if size > 1)
        raise ConfigError(
            f"{words}{f' = {product_of_axes}' if '*' in words else ''} does not divide nodes * devices = {nodes} * "
            f"{devices} = {nodes * devices}; the product must be one of {_divisors(nodes * devices)}"
        )
    return nodes * devices // product_of_axes


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
