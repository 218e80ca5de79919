"""What a process finds around itself: devices, launcher, run id. No torch."""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.plan import Host


def inspect_host(environ: Mapping[str, str] = os.environ) -> Host:
    """Read the environment once. Under torchrun nodes and devices are what it started."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ
    nodes = devices = None
    if under_torchrun:
        devices = int(environ["LOCAL_WORLD_SIZE"])
        world_size = int(environ["WORLD_SIZE"])
        if world_size % devices:
            raise ConfigError(f"torchrun started {world_size} ranks, {devices} on this node: nodes must be alike")
        nodes = world_size // devices
    return Host(
        cuda_devices=count_cuda_devices(environ),
        launcher="torchrun" if under_torchrun else "local",
        nodes=nodes,
        devices=devices,
        run_id=_run_id(environ, nodes),
        is_terminal=_is_terminal(),
    )


def _is_terminal() -> bool:
    """One that a progress bar can be drawn on: `docker run -t` and the like may give one without columns."""
    return sys.stdout.isatty() and sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0


def _run_id(environ: Mapping[str, str], nodes: int | None) -> str | None:
    """From Slurm's job and array ids, else torchrun's run id, else made here. None: several nodes, nothing shared."""
    if "SLURM_JOB_ID" in environ and "SLURM_PROCID" in environ:
        if "SLURM_ARRAY_JOB_ID" in environ:
            return f"slurm-{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
        return f"slurm-{environ['SLURM_JOB_ID']}"
    if nodes is not None:
        if (elastic_id := environ["TORCHELASTIC_RUN_ID"]) not in ("", "none"):
            return re.sub(r"[^A-Za-z0-9._-]", "-", elastic_id)
        if nodes > 1:
            return None
        # All ranks of one node have the same parent: its id and start time are theirs alone.
        started = Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(")", 1)[1].split()[19]
        return f"torchrun-{os.getppid()}-{started}"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def count_cuda_devices(environ: Mapping[str, str] = os.environ) -> int:
    """CUDA devices visible to this process, without importing torch (NVML, else the device files)."""
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        wanted = [word for word in visible.split(",") if word.strip() not in ("", "-1", "NoDevFiles")]
        return min(len(wanted), _installed_cuda_devices()) if wanted else 0
    return _installed_cuda_devices()


def _installed_cuda_devices() -> int:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        count = ctypes.c_uint()
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
            return count.value
    except OSError:
        pass
    return len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()])
