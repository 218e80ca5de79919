"""Mesh arithmetic: every rank has a place, every divisor is taken, everything else is refused with what would do."""

import ast
import re

import pytest

from shardwise.errors import ConfigError
from shardwise.plan.topology import Topology, make_topology

SIZES = [(nodes, devices) for nodes in range(1, 7) for devices in range(1, 10)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp_hybrid"])
def test_every_rank_has_a_place(strategy: str) -> None:
    for nodes, devices in SIZES:
        world = nodes * devices
        for shard_size in range(1, world + 1) if strategy == "fsdp_hybrid" else (None,):
            if shard_size and world % shard_size:
                continue
            topology = make_topology(strategy, nodes, devices, shard_size)
            assert topology.world_size == world
            assert topology.replicate * topology.shard == topology.data_parallel_size == world
            assert topology.shard == {"ddp": 1, "fsdp": world, "fsdp_hybrid": shard_size}[strategy]
            assert topology.mesh == {"replicate": topology.replicate, "shard": topology.shard}
            assert [topology.data_parallel_rank(rank) for rank in range(world)] == list(range(world))


def test_peers_on_other_axes_share_a_data_parallel_rank() -> None:
    class WithTensorAxis(Topology):
        @property
        def data_parallel_size(self) -> int:
            return self.world_size // 4

    topology = WithTensorAxis(nodes=2, devices=8, replicate=1, shard=4)
    assert [topology.data_parallel_rank(rank) for rank in range(16)] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_hybrid_shards_within_a_node_unless_told() -> None:
    for nodes, devices in SIZES:
        if nodes > 1 or devices == 1:
            topology = make_topology("fsdp_hybrid", nodes, devices)
            assert topology.mesh == {"replicate": nodes, "shard": devices}


def test_hybrid_on_one_node_asks_for_a_size_and_every_size_that_it_names_works() -> None:
    for devices in range(2, 17):
        with pytest.raises(ConfigError, match=rf"shard_size.*divisor of nodes \* devices = {devices}") as error:
            make_topology("fsdp_hybrid", 1, devices)
        _each_works(str(error.value), 1, devices)
        assert make_topology("fsdp", 1, devices).shard == devices


def test_a_shard_size_that_does_not_divide_is_refused_and_every_size_that_it_names_works() -> None:
    for nodes, devices in SIZES:
        world = nodes * devices
        for shard_size in {-1, 0, *range(1, world + 3)} - {d for d in range(1, world + 1) if world % d == 0}:
            expected = rf"shard_size={shard_size} does not divide nodes \* devices = {nodes} \* {devices} = {world}"
            with pytest.raises(ConfigError, match=expected) as error:
                make_topology("fsdp_hybrid", nodes, devices, shard_size)
            _each_works(str(error.value), nodes, devices)


def _each_works(message: str, nodes: int, devices: int) -> None:
    [named] = re.findall(r"\[[\d, ]+\]", message)
    for shard_size in ast.literal_eval(named):
        assert make_topology("fsdp_hybrid", nodes, devices, shard_size).shard == shard_size


@pytest.mark.parametrize(("nodes", "devices", "said"), [(0, 1, "nodes=0"), (1, 0, "devices=0"), (-2, 4, "nodes=-2")])
def test_sizes_start_at_one(nodes: int, devices: int, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said}: must be at least 1"):
        make_topology("ddp", nodes, devices)
