"""Lays out the ranks as mesh axes. This is arithmetic alone, without torch and environment."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """Nodes × devices as mesh axes. Ranks are numbered node by node, and the last axis varies fastest.

    `replicate`: the number of copies of the parameters. `shard`: the number of ranks that share one copy. Their product
    is the data-parallel size. Further axes (`context`, `tensor`, `pipeline`) will divide the other ranks.
    """

    nodes: int
    devices: int
    replicate: int
    shard: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks that see different samples."""
        return self.replicate * self.shard

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the axes by name, outermost first."""
        return {"replicate": self.replicate, "shard": self.shard}

    def data_parallel_rank(self, rank: int) -> int:
        """The number of `rank` among those that see different samples. Peers on other axes will share it."""
        return rank // (self.world_size // self.data_parallel_size)


def make_topology(strategy: str, nodes: int, devices: int, shard_size: int | None = None) -> Topology:
    """Lay out `nodes` × `devices` ranks for a strategy.

    `shard_size` (fsdp_hybrid only): ranks that share one copy of the parameters; None means the devices of one node.

    Raises:
        ConfigError: a shard size that does not divide the ranks, or a hybrid that is no hybrid.
    """
    for word, value in (("nodes", nodes), ("devices", devices)):
        if value < 1:
            raise ConfigError(f"{word}={value}: must be at least 1")
    world_size = nodes * devices
    if strategy == "ddp":
        return Topology(nodes, devices, replicate=world_size, shard=1)
    if strategy != "fsdp_hybrid":  # fsdp, zero1, zero2, zero3: something is sharded over all ranks
        return Topology(nodes, devices, replicate=1, shard=world_size)
    if shard_size is None:
        if nodes == 1 and world_size > 1:
            raise ConfigError(
                f"strategy=fsdp_hybrid on one node needs strategy.shard_size, the ranks that share one copy of the "
                f"parameters: a divisor of nodes * devices = {world_size} (one of {_divisors(world_size)}); "
                f"strategy=fsdp shards over all of them"
            )
        shard_size = devices
    if shard_size < 1 or world_size % shard_size:
        raise ConfigError(
            f"strategy.shard_size={shard_size} does not divide nodes * devices = {nodes} * {devices} = {world_size}; "
            f"use one of {_divisors(world_size)}"
        )
    return Topology(nodes, devices, replicate=world_size // shard_size, shard=shard_size)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
