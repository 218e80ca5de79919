"""The mesh of ranks: its axes, and groups of ranks by name. Every collective of a step names one of these groups."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from shardwise.distributed.process_group import group_timeout
from shardwise.plan import Plan

GroupName = Literal["world", "data", "loss"]


class Mesh:
    """The groups of one run.

    `world`: every rank.
    `data`: ranks that read different samples; their losses are weighed with each other.
    `loss`: ranks among which losses and gradients are averaged.

    On a mesh that has only the axes `replicate` and `shard`, each group is all ranks.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def group(self, name: GroupName) -> dist.ProcessGroup:
        """The group of that name which this rank is in. The process group must have begun."""
        assert name in ("world", "data", "loss") and dist.group.WORLD is not None
        return dist.group.WORLD

    def data_rank(self, rank: int) -> int:
        """The number of a rank among those that read different samples."""
        return self.plan.topology.data_parallel_rank(rank)

    def build_shard_mesh(self, device_type: str) -> DeviceMesh:
        """Build FSDP2's mesh: the axis `shard`, and `replicate` if there are copies. Collective."""
        topology = self.plan.topology
        axes = {"shard": topology.shard} if topology.replicate == 1 else topology.mesh
        mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        for axis in axes:  # their groups are made with NCCL's default time limit
            limit_wait(mesh.get_group(axis), self.plan)
        return mesh


def limit_wait(group: dist.ProcessGroup, plan: Plan) -> None:
    """Give `group` the time limit of every process group of the run."""
    _set_pg_timeout(group_timeout(plan), group)
