"""The process group of all ranks: how it begins, how long it waits, and what NCCL records of it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torchmetrics import Metric

from shardwise import accelerator
from shardwise.plan import Plan
from shardwise.run_dir.files import nccl_trace

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
