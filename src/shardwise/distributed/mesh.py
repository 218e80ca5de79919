"""The mesh of ranks: its axes, and groups of ranks by name. Every collective of a step names one of these groups."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor._random import manual_seed

from shardwise import accelerator
from shardwise.distributed.process_group import group_timeout, made_once, own_group
from shardwise.plan import Plan

GroupName = Literal["world", "data", "samples", "loss", "stage", "tensor", "context", "pipeline"]
# A group's name → the axes on which its ranks differ
_AXES: dict[str, tuple[str, ...]] = {
    "data": ("replicate", "shard", "context"),
    "samples": ("replicate", "shard"),
    "loss": ("replicate", "shard", "context"),
    "stage": ("replicate", "shard", "context", "tensor"),
    "tensor": ("tensor",),
    "context": ("context",),
    "pipeline": ("pipeline",),
}


class Mesh:
    """The groups of one run.

    `world`: every rank.
    `data`: ranks that read different samples, or parts of samples; their losses are weighed with each other.
    `samples`: ranks that read different samples.
    `loss`: ranks among which losses and gradients are averaged.
    `stage`: ranks that have the same layers, and so the same buffers.
    `tensor`, `context`, `pipeline`: the ranks of one axis, which see the same samples.

    On a mesh that has only the axes `replicate` and `shard`, the first five are all ranks.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.topology = plan, plan.topology
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}  # the axes of a group → this rank's

    def build(self) -> None:
        """Make the groups. Collective. The process group must have begun."""
        if self.topology.is_data_parallel_only:
            return
        for axes in sorted(set(_AXES.values())):
            group = own_group(self.topology.groups(axes), group_timeout(self.plan))
            assert group is not None
            self._groups[axes] = group

    def group(self, name: GroupName) -> dist.ProcessGroup:
        """The group of that name which this rank is in. The process group must have begun."""
        assert dist.group.WORLD is not None
        if name == "world" or self.topology.is_data_parallel_only:
            assert name in ("world", "data", "samples", "loss", "stage")
            return dist.group.WORLD
        return self._groups[_AXES[name]]

    def data_rank(self, rank: int) -> int:
        """The number of a rank among those that read different samples."""
        return self.topology.data_parallel_rank(rank)

    @property
    def counts_samples(self) -> bool:
        """Whether this rank stands for its peers in sums over all ranks of what they share: the first of its tensor
        axis, in the last stage of its pipeline, which knows the loss."""
        position = self.topology.position(dist.get_rank())
        return position["tensor"] == 0 and position["pipeline"] == 0

    def build_shard_mesh(self, device_type: str) -> DeviceMesh:
        """Build FSDP2's mesh: `shard` with `context` in it, and `replicate` if there are copies. Collective."""
        key = ("mesh", device_type, self.topology, group_timeout(self.plan))
        return made_once(key, lambda: self._build_shard_mesh(device_type))

    def _build_shard_mesh(self, device_type: str) -> DeviceMesh:
        topology = self.topology
        shard = topology.shard * topology.context
        axes = {"pipeline": topology.pipeline, "replicate": topology.replicate, "shard": shard,
                "tensor": topology.tensor}  # fmt: skip
        axes = {axis: size for axis, size in axes.items() if size > 1 or axis == "shard"}
        mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        for axis in axes:  # their groups are made with NCCL's default time limit
            limit_wait(mesh.get_group(axis), self.plan)
        if device_type != "cpu":
            _keep_own_random_streams(mesh)
        own = tuple(axis for axis in axes if axis in ("replicate", "shard"))
        return mesh if own == tuple(axes) else mesh[own]


def _keep_own_random_streams(mesh: DeviceMesh) -> None:
    """Let DTensors on GPUs draw from the stream of each rank.

    Otherwise torch broadcasts rank 0's random state at the first random operation on a DTensor. A run that goes on does
    so at another step, and a rank that draws nothing lets the others wait.
    """
    with accelerator.random_state_kept(torch.device(mesh.device_type)):
        manual_seed(0, mesh)  # besides seeding, it makes torch's tracker of random numbers without that broadcast


def limit_wait(group: dist.ProcessGroup, plan: Plan) -> None:
    """Give `group` the time limit of every process group of the run."""
    _set_pg_timeout(group_timeout(plan), group)
