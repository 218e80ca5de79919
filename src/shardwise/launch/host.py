"""Finds out what a process runs under: devices, launcher, run id. No torch."""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from shardwise.devices import (
    apple_gpu,
    count_cuda_devices,
    count_granted_cpus,
    count_rocm_devices,
    count_xpu_devices,
    gpu_capability,
    name_amd_gpu,
    name_gpu,
)
from shardwise.errors import ConfigError, count
from shardwise.launch.slurm import read_cpus_per_task, read_number, read_run_id, read_task
from shardwise.plan import Host
from shardwise.plan.plan import Launcher


def inspect_host(environ: Mapping[str, str] = os.environ) -> Host:
    """Read the environment once. Under torchrun and srun, the nodes and devices are those that they have started."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ
    launcher: Launcher = "local"
    nodes = devices = None
    if under_torchrun:
        launcher = "torchrun"
        names = ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "LOCAL_RANK", "RANK")
        devices, world_size, *_ = (read_number(environ, name, "torchrun") for name in names)
        if world_size % devices:
            raise ConfigError(
                f"torchrun started {count(world_size, 'rank')}, {devices} on this node: nodes must be alike"
            )
        nodes = world_size // devices
    elif (task := read_task(environ)) is not None:
        launcher, nodes, devices = "slurm", task.nodes, task.devices
    gpus, rocm = count_cuda_devices(environ), count_rocm_devices(environ) > 0
    return Host(
        cuda_devices=gpus,
        gpu=name_amd_gpu() if rocm else name_gpu(environ) if gpus else None,
        gpu_capability=gpu_capability() if gpus and not rocm else None,
        rocm=rocm,
        xpu_devices=count_xpu_devices(environ),
        macos=apple_gpu(environ),
        launcher=launcher,
        nodes=nodes,
        devices=devices,
        run_id=read_run_id(environ) or _run_id(environ, nodes),
        run_id_is_new=read_run_id(environ) is None and nodes is None,
        is_terminal=_is_terminal(),
        cpus=(cpus := count_granted_cpus()),
        cpus_per_rank=None if launcher != "slurm" else min(cpus, read_cpus_per_task(environ) or cpus),
    )


def _is_terminal() -> bool:
    """Whether a progress bar can be drawn. The terminal of `docker run -t` and the like may have no columns."""
    return sys.stdout.isatty() and sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0


def _run_id(environ: Mapping[str, str], nodes: int | None) -> str | None:
    """Torchrun's run id, or a new one; None: several nodes share nothing that an id could be made from."""
    if nodes is not None:
        if (elastic_id := environ["TORCHELASTIC_RUN_ID"]) not in ("", "none"):
            return re.sub(r"[^A-Za-z0-9._-]", "-", elastic_id)
        if nodes > 1:
            return None
        # All ranks of one node have the same parent, and no other run has its id and start time.
        started = Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(")", 1)[1].split()[19]
        return f"torchrun-{os.getppid()}-{started}"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
