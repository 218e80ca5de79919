"""Finds out what a process runs under: devices, launcher, run id. No torch."""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from shardwise.config.schema import RunConfig
from shardwise.devices import (
    count_cuda_devices,
    count_granted_cpus,
    count_rocm_devices,
    gpu_capability,
    name_amd_gpu,
    name_gpu,
)
from shardwise.errors import ConfigError, count
from shardwise.launch.slurm import read_cpus_per_task, read_number, read_run_id, read_task
from shardwise.plan import Host, Plan
from shardwise.plan.hardware import is_amd, is_gpu
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
        launcher=launcher,
        nodes=nodes,
        devices=devices,
        run_id=read_run_id(environ) or _run_id(environ, nodes),
        run_id_is_new=read_run_id(environ) is None and nodes is None,
        is_terminal=_is_terminal(),
        cpus=(cpus := count_granted_cpus()),
        cpus_per_rank=None if launcher != "slurm" else min(cpus, read_cpus_per_task(environ) or cpus),
    )


def planned_host(config: RunConfig, here: Host, nodes: int | None = None) -> Host:
    """The machines that a run is planned for: `here` if it can start there, else what the config says of others.

    `nodes`: those of a job of Slurm's; None: as the config says.
    """
    cluster, word = config.cluster, config.accelerator
    is_job = nodes is not None or (config.nodes or 1) > 1
    nodes = nodes if nodes is not None else config.nodes
    devices = config.devices if config.devices is not None else cluster.devices_per_node if is_job else None
    devices = 1 if devices is None else devices
    is_like_here = cluster.gpu is None or (here.gpu is not None and is_gpu(cluster.gpu, here.gpu))
    is_auto = word == "auto"
    cuda = word == "cuda" or (is_auto and (cluster.gpu is not None or here.cuda_devices > 0))
    enough = max(devices, 1) <= (here.cuda_devices if cuda else devices)
    if not is_job and enough and (is_like_here or not cuda):
        return here
    gpu = None if not cuda else here.gpu if is_like_here else cluster.gpu
    return Host(
        cuda_devices=max(devices, 1) if cuda else 0,
        gpu=gpu,
        gpu_capability=here.gpu_capability if cuda and is_like_here else None,
        rocm=is_amd(gpu) or (cuda and is_like_here and here.rocm),
        cpus=cluster.cpu_cores or here.cpus,
        launcher="slurm" if is_job else here.launcher,
        nodes=nodes if is_job else None,
        devices=devices if is_job else None,
        run_id="slurm-JOB" if is_job else here.run_id,
        run_id_is_new=not is_job and here.run_id_is_new,
        is_terminal=here.is_terminal,
    )


def explain_planned(config: RunConfig, plan: Plan, here: Host) -> list[str]:
    """A line of a dry run whose run cannot start here: what it is planned for."""
    if here.launcher != "local" or planned_host(config, here) is here:
        return []
    topology, kind = plan.topology, "CPU processes" if plan.accelerator == "cpu" else "GPUs"
    gpus = "; cluster=NAME, such as dgx_h100, or accelerator=cuda plans for GPUs" if plan.accelerator == "cpu" else ""
    return [
        f"planned for {count(topology.nodes, 'node')} of cluster={config.cluster.name} with {topology.devices} {kind} "
        f"each, not for this machine{gpus}"
    ]


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
