"""What Slurm has told this process, and what a job's batch script is told back. No torch.

A job that slurm/job.sh runs has a folder (`SHARDWISE_JOB_DIR`, on the file system that its nodes share) that outlives
its requeues: `done`, `saved` (a step), `begun` (the run's folder), `start-N/code-C` (why start N ended, one file a
code). A batch script decides by these: srun's own exit code is that of whichever rank had the highest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ConfigError, count

_SPECIAL = 0xFFFFFFF0  # steps from here on are no srun's: the batch script, salloc's shell
# Below what Linux hands out by itself (32768 on)
_PORTS = range(25_000, 32_768)


@dataclass(frozen=True)
class Task:
    """One of the tasks that srun has started: a rank."""

    rank: int
    local_rank: int
    node: int
    nodes: int
    devices: int  # tasks a node
    master: str
    port: int

    def environment(self) -> dict[str, str]:
        """In torch's words."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "GROUP_RANK": str(self.node),
            "WORLD_SIZE": str(self.nodes * self.devices),
            "LOCAL_WORLD_SIZE": str(self.devices),
            "MASTER_ADDR": self.master,
            "MASTER_PORT": str(self.port),
        }


def read_task(environ: Mapping[str, str] = os.environ) -> Task | None:
    """None: no rank of srun's. A batch script, a shell that salloc or `srun --pty` has opened, and a step of a single
    task have Slurm's variables too: what is started there starts its own ranks.

    Raises:
        ConfigError: nodes with different numbers of tasks, or ranks that are not numbered node by node.
    """
    if _is_shell(environ) or int(environ.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return None
    spread = environ["SLURM_STEP_TASKS_PER_NODE"]  # 8(x4)
    found = re.fullmatch(r"(\d+)(\(x\d+\))?", spread)
    if found is None:
        raise ConfigError(
            f"srun started {spread} tasks on its nodes, and nodes must be alike: give --ntasks-per-node=N, not --ntasks"
        )
    rank, local_rank, node = (int(environ[f"SLURM_{word}"]) for word in ("PROCID", "LOCALID", "NODEID"))
    nodes, devices = int(environ["SLURM_STEP_NUM_NODES"]), int(found[1])
    if rank != node * devices + local_rank:
        raise ConfigError(
            f"srun has task {rank} as number {local_rank} of node {node}, with {devices} a node: ranks are numbered "
            f"node by node; leave --distribution out, or --distribution=block"
        )
    # Two jobs on one node have different ports, and so does a job that is started again
    restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
    number = int(environ["SLURM_JOB_ID"]) * 8 + int(environ["SLURM_STEP_ID"]) + restarts * 1024
    return Task(
        rank, local_rank, node, nodes, devices,
        master=environ.get("MASTER_ADDR") or first_host(environ["SLURM_STEP_NODELIST"]),
        port=int(environ.get("MASTER_PORT") or _PORTS[number % len(_PORTS)]),
    )  # fmt: skip


def _is_shell(environ: Mapping[str, str]) -> bool:
    """Not a program that srun itself has started."""
    if int(environ.get("SLURM_STEP_ID") or _SPECIAL) >= _SPECIAL:
        return True
    if "SLURM_PTY_PORT" not in environ:
        return False
    with suppress(OSError):  # srun --pty: its program, or what somebody types there
        return Path(f"/proc/{os.getppid()}/comm").read_text().strip() != "slurmstepd"
    return True


def read_run_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """The same whenever the job is started again. None: outside of a job, or in a shell, which may start many runs."""
    if "SLURM_JOB_ID" not in environ or "SLURM_PROCID" not in environ:
        return None  # salloc's shell has no PROCID
    if "SLURM_STEP_ID" in environ and _is_shell(environ):
        return None
    if "SLURM_ARRAY_JOB_ID" in environ:
        return f"slurm-{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return f"slurm-{environ['SLURM_JOB_ID']}"


def read_array_member(jobs: int, environ: Mapping[str, str] = os.environ) -> int | None:
    """Which job of a sweep is this array member's. None: no array, or a shell.

    Raises:
        ConfigError: an array of another size than the sweep.
    """
    if read_run_id(environ) is None or "SLURM_ARRAY_TASK_ID" not in environ:
        return None
    member, members = int(environ["SLURM_ARRAY_TASK_ID"]), int(environ.get("SLURM_ARRAY_TASK_COUNT", jobs))
    if members < jobs and environ["SLURM_PROCID"] == "0":
        print(
            f"this array has {members} of the sweep's {count(jobs, 'run')}: sbatch --array=0-{jobs - 1} has all",
            flush=True,
        )
    if member >= jobs:
        raise ConfigError(
            f"member {member} of a job array, and -m makes {jobs} runs, numbered from 0: sbatch --array=0-{jobs - 1} …"
        )
    return member


def first_host(hosts: str) -> str:
    """`dgx[03-05,09],login1` → `dgx03`: Slurm's own scontrol may be missing in a container."""
    first = re.match(r"(?:[^,\[]|\[[^]]*\])+", hosts)
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0]) if first else hosts


def all_hosts(hosts: str) -> list[str]:
    """`dgx[03-05,09],login1` → dgx03, dgx04, dgx05, dgx09, login1: in the order of Slurm's node numbers."""
    found = []
    for word in re.findall(r"(?:[^,\[]|\[[^]]*\])+", hosts):
        parts = re.split(r"\[([^]]*)\]", word)  # text, numbers, text …
        names = [""]
        for number, part in enumerate(parts):
            choices = _numbers(part) if number % 2 else [part]
            names = [name + choice for name in names for choice in choices]
        found += names
    return found


def _numbers(spread: str) -> list[str]:
    """`03-05,09` → 03, 04, 05, 09."""
    found = []
    for word in spread.split(","):
        first, _, last = word.partition("-")
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)] if last else [word]
    return found
