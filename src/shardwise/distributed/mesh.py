"""Groups of ranks: the process group of all, the axes of the mesh, and collectives over one of these groups."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor._random import manual_seed
from torchmetrics import Metric

from shardwise import accelerator
from shardwise.plan import Plan
from shardwise.run_dir.files import nccl_trace

# The mesh of ranks: its axes, and groups of ranks by name. Every collective of a step names one of these groups.

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


# The process group of all ranks: how it begins, how long it waits, and what NCCL records of it.

Made = TypeVar("Made")
_own_sync = Metric.sync
# The process group of all ranks → what `made_once` has made in its life
_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], Any]] = WeakKeyDictionary()


def group_timeout(plan: Plan) -> timedelta:
    """The time limit of every process group. It is so long that the watchdog, which reports more, ends a hang first."""
    return timedelta(minutes=4 * plan.strategy.timeout_minutes + 1)


def keep_nccl_record(run_dir: str) -> None:
    """Let NCCL's own watchdog write what every rank was doing into `run_dir`. The user's settings are kept."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the older name of the next variable
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # the number of collectives
    for name, value in (
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(nccl_trace(run_dir))),
    ):
        os.environ.setdefault(name, value)


def gather_metrics_among(group: dist.ProcessGroup | None) -> None:
    """Let metrics of torchmetrics that name no group gather among `group`; None: among all ranks, as they do.

    It holds for the class until it is called again: a metric may be kept in a dict, an object or a callback, or be made
    in a hook, and `on_fit_end` comes when the strategy is torn down already.
    """

    @functools.wraps(_own_sync)
    def sync(metric: Metric, dist_sync_fn: Any = None, process_group: Any = None, *more: Any, **named: Any) -> None:
        _own_sync(metric, dist_sync_fn, process_group or metric.process_group or group, *more, **named)

    Metric.sync = _own_sync if group is None else sync  # type: ignore[assignment, method-assign]


def init_process_group(plan: Plan) -> None:
    """Make the process group of the run, under every strategy and also for a single process."""
    timeout = group_timeout(plan)
    backend = accelerator.backend(plan.accelerator)
    if plan.topology.world_size == 1 and "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    device = None
    if backend != "gloo":
        device = accelerator.device_of_rank(plan.accelerator, int(os.environ["LOCAL_RANK"]))
        accelerator.set_device(device)
    if backend == "nccl":
        keep_nccl_record(plan.run_dir)
    if plan.topology.world_size == 1:  # no port, no rendezvous
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, device_id=device)
    else:
        dist.init_process_group(backend, timeout=timeout, device_id=device)


def made_once(key: tuple[object, ...], make: Callable[[], Made]) -> Made:
    """What `make()` gives the first time. A run that is rolled back takes it again: groups that were made anew with
    each roll-back would add up, with their threads, sockets and, under NCCL, memory of the device.

    The process group of all ranks must have begun; with it ends what was made.
    """
    assert dist.group.WORLD is not None
    made = _made.setdefault(dist.group.WORLD, {})
    if key not in made:
        made[key] = make()
    result: Made = made[key]
    return result


def own_group(groups: Sequence[Sequence[int]], timeout: timedelta, use: str = "") -> dist.ProcessGroup | None:
    """Of `groups` of ranks, the one that this rank is in; None: it is in none. Collective among all ranks.

    The same ranks get the same group, unless its `use` is another one.
    """

    def make() -> dist.ProcessGroup | None:
        own, _ = dist.new_subgroups_by_enumeration(groups, timeout=timeout)  # type: ignore[no-untyped-call]
        return own  # type: ignore[no-any-return]

    return made_once((str(groups), timeout, use), make)


class Closing:
    """What a run has to close at its end, the group of all hosts for work on files among it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._calls: list[Callable[[], Any]] = []
        self._file_group: dist.ProcessGroup | None = None

    def add(self, close: Callable[[], Any]) -> None:
        """Call `close` at the end, also after an error: what was added last is closed first."""
        self._calls.append(close)

    def file_group(self) -> dist.ProcessGroup:
        """The group. The first call is collective."""
        if self._file_group is None:
            self._file_group = dist.new_group(backend="gloo", timeout=group_timeout(self._plan))
            self.add(functools.partial(dist.destroy_process_group, self._file_group))
        return self._file_group

    def close(self) -> None:
        while self._calls:
            self._calls.pop()()
        self._file_group = None


# Collectives over a named group of ranks. In a group of one rank nothing is sent.


def broadcast_from_rank_zero(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite every rank's tensors with the values of the first rank of the group."""
    if group.size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, group_src=0, group=group)


def sum_over(group: dist.ProcessGroup, values: Tensor) -> Tensor:
    """Sum `values` over the group, in place. Does not wait for the device."""
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values


def largest_over(group: dist.ProcessGroup, values: Tensor) -> Tensor:
    """Take the maximum of `values` over the group, in place. Does not wait for the device.

    `values` must not hold a NaN: gloo may give the other ranks' number in its place.
    """
    if group.size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values


def mean_over(group: dist.ProcessGroup, value: Tensor) -> Tensor:
    """The mean over the group, in float64. `value` is not changed. Does not wait for the device."""
    return sum_over(group, value.to(torch.float64, copy=True)) / group.size()


def gather_in_order(group: dist.ProcessGroup, values: Tensor) -> Tensor:
    """Put together the `values` of all ranks, in the order of ranks. Every rank has equally many."""
    if group.size() == 1:
        return values
    whole = values.new_empty(group.size() * values.numel())
    dist.all_gather_into_tensor(whole, values, group=group)
    return whole


def gather_objects(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    """Gather the `value` of every rank of the group, in the order of ranks. None is the group of all ranks."""
    found: list[Any] = [value] * dist.get_world_size(group)
    if len(found) > 1:
        dist.all_gather_object(found, value, group=group)
    return found
