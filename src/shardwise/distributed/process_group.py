"""The process group of all ranks: how it begins, how long it waits, and what NCCL records of it."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
import torchmetrics.metric
from torch._C._distributed_c10d import HashStore

from shardwise import accelerator
from shardwise.plan import Plan
from shardwise.run_dir.files import nccl_trace


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


def leave_metrics_alone() -> None:
    """Let torchmetrics gather nothing: it would do so in a group of one rank too."""
    torchmetrics.metric.jit_distributed_available = lambda: False


def init_process_group(plan: Plan) -> None:
    """Make the process group of the run, under every strategy and also for a single process."""
    timeout = group_timeout(plan)
    backend = accelerator.backend(plan.accelerator)
    if not accelerator.can_exchange(plan.accelerator):
        leave_metrics_alone()
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
