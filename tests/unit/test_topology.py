"""Mesh arithmetic: every rank has a place, every divisor is taken, everything else is refused with what would do."""

import ast
import re

import pytest

from shardwise.errors import ConfigError
from shardwise.plan.topology import AXES, make_topology

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


@pytest.mark.parametrize("axes", [{"tensor": 4}, {"context": 2, "tensor": 2}, {"context": 4}])
def test_peers_on_other_axes_share_a_data_parallel_rank(axes: dict[str, int]) -> None:
    topology = make_topology("fsdp", 2, 8, **axes)
    assert (topology.shard, topology.data_parallel_size) == (4, 4)
    assert [topology.data_parallel_rank(rank) for rank in range(16)] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_pipelines_are_outermost_and_rank_zero_has_the_last_stage() -> None:
    topology = make_topology("fsdp_hybrid", 2, 8, 2, tensor=2, pipeline=2)
    assert topology.mesh == {"pipeline": 2, "replicate": 2, "shard": 2, "tensor": 2}
    assert [topology.pipeline_rank(rank) for rank in range(16)] == [1] * 8 + [0] * 8
    assert [topology.data_parallel_rank(rank) for rank in range(16)] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert topology.position(13) == {"pipeline": 1, "replicate": 1, "shard": 0, "context": 0, "tensor": 1}
    assert topology.groups(["pipeline"]) == [[rank, rank + 8] for rank in range(8)]
    assert topology.groups(["tensor"]) == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert topology.groups(["replicate", "shard"])[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_groups_hold_every_rank_once_and_differ_on_their_axes_alone() -> None:
    topology = make_topology("fsdp_hybrid", 4, 12, 2, context=2, tensor=3, pipeline=2)
    for number in range(2 ** len(AXES)):
        axes = [axis for i, axis in enumerate(AXES) if number >> i & 1]
        groups = topology.groups(axes)
        assert sorted(rank for group in groups for rank in group) == list(range(48))
        for group in groups:
            assert group == sorted(group)
            others = {tuple(p for axis, p in topology.position(rank).items() if axis not in axes) for rank in group}
            assert len(others) == 1


@pytest.mark.parametrize(("axes", "said"), [
    ({"tensor": 3}, "tensor_parallel_size=3 does not divide devices=8: the ranks of a tensor axis are on one node"),
    ({"tensor": 0}, "tensor_parallel_size=0: must be at least 1"),
    ({"context": 5}, r"context_parallel_size=5 does not divide nodes \* devices = 2 \* 8 = 16"),
    ({"context": 4, "pipeline": 3},
     r"context_parallel_size=4 \* strategy.pipeline_parallel_size=3 = 12 does not divide"),
])  # fmt: skip
def test_axes_that_do_not_divide_the_ranks_are_refused(axes: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_topology("fsdp", 2, 8, **axes)


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
