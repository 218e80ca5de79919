"""Reads what Slurm says about this process: rank, nodes, job, array member. No torch.

A job that slurm/job.sh runs has a folder (`SHARDWISE_JOB_DIR`, on the file system that its nodes share) that outlives
its requeues. It holds `done`, `saved` (a step), `begun` (the run's folder), and `start-N/code-C` (why start N ended,
one file for each exit code). The batch script decides by these files, since srun's exit code is only the highest of
all ranks'.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ConfigError, count

_SPECIAL = 0xFFFFFFF0  # step numbers from here on are not srun's, but those of the batch script or of salloc's shell
# These ports are below those that Linux hands out by itself (from 32768 on)
_PORTS = range(25_000, 32_768)


@dataclass(frozen=True)
class Task:
    """One of the tasks that srun has started; each is a rank."""

    rank: int
    local_rank: int
    node: int
    nodes: int
    devices: int  # tasks a node
    master: str
    port: int

    def environment(self) -> dict[str, str]:
        """The environment variables that torch reads."""
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
    """The task that this process is; None: srun has not started it as a rank.

    A batch script, a shell of salloc or `srun --pty`, and a step of a single task have Slurm's variables too: a run
    that is started there starts its own ranks.

    Raises:
        ConfigError: nodes with different numbers of tasks, ranks that are not numbered node by node, or a variable of
            Slurm's that is missing.
    """
    if _is_shell(environ) or read_number(environ, "SLURM_STEP_NUM_TASKS") == 1:
        return None
    spread = read_variable(environ, "SLURM_STEP_TASKS_PER_NODE")  # 8(x4)
    found = re.fullmatch(r"(\d+)(\(x\d+\))?", spread)
    if found is None:
        raise ConfigError(
            f"srun started {spread} tasks on its nodes, and nodes must be alike: give --ntasks-per-node=N, not --ntasks"
        )
    rank, local_rank, node = (read_number(environ, f"SLURM_{word}") for word in ("PROCID", "LOCALID", "NODEID"))
    nodes, devices = read_number(environ, "SLURM_STEP_NUM_NODES"), int(found[1])
    if rank != node * devices + local_rank:
        raise ConfigError(
            f"srun has task {rank} as number {local_rank} of node {node}, with {devices} a node: ranks are numbered "
            f"node by node; leave --distribution out, or --distribution=block"
        )
    # Two jobs on one node get different ports, as do two starts of one job
    restarts = read_number(environ, "SLURM_RESTART_COUNT") if "SLURM_RESTART_COUNT" in environ else 0
    number = read_number(environ, "SLURM_JOB_ID") * 8 + read_number(environ, "SLURM_STEP_ID") + restarts * 1024
    return Task(
        rank, local_rank, node, nodes, devices,
        master=environ.get("MASTER_ADDR") or first_host(read_variable(environ, "SLURM_STEP_NODELIST")),
        port=int(environ.get("MASTER_PORT") or _PORTS[number % len(_PORTS)]),
    )  # fmt: skip


def read_variable(environ: Mapping[str, str], name: str, launcher: str = "srun") -> str:
    """A variable that `launcher` sets in every process that it starts.

    Raises:
        ConfigError: it is not there, although others of the launcher's are.
    """
    if not (value := environ.get(name, "")):
        raise ConfigError(
            f"{name} is not set, though other variables say that {launcher} has started this process, and {launcher} "
            f"sets it: start train.py by {launcher} itself, and let whatever stands between them (a container, sudo, "
            f"env -i) keep the variables"
        )
    return value


def read_number(environ: Mapping[str, str], name: str, launcher: str = "srun") -> int:
    """A variable of the launcher's that is a whole number.

    Raises:
        ConfigError: it is missing, or something else.
    """
    if not (value := read_variable(environ, name, launcher)).isdecimal():
        raise ConfigError(f"{name}={value}: {launcher} sets it to a whole number, and something has changed it")
    return int(value)


def read_cpus_per_task(environ: Mapping[str, str] = os.environ) -> int | None:
    """The CPUs of each of srun's tasks; None: Slurm does not say."""
    if (given := environ.get("SLURM_CPUS_PER_TASK", "")).isdigit():
        return int(given)
    on_node, task = environ.get("SLURM_CPUS_ON_NODE", ""), read_task(environ)
    return max(1, int(on_node) // task.devices) if on_node.isdigit() and task is not None else None


def _is_shell(environ: Mapping[str, str]) -> bool:
    """Whether this process runs in a batch script or a shell, so that srun itself has not started it."""
    if not environ.get("SLURM_STEP_ID") or read_number(environ, "SLURM_STEP_ID") >= _SPECIAL:
        return True
    if "SLURM_PTY_PORT" not in environ:
        return False
    with suppress(OSError):  # under srun --pty this is its program, or a command that a user typed in its shell
        return Path(f"/proc/{os.getppid()}/comm").read_text().strip() != "slurmstepd"
    return True


def read_run_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """A run id that stays the same when the job is requeued; None: no job, or a shell, which may start many runs."""
    if "SLURM_JOB_ID" not in environ or "SLURM_PROCID" not in environ:
        return None  # salloc's shell has no SLURM_PROCID
    if "SLURM_STEP_ID" in environ and _is_shell(environ):
        return None
    if "SLURM_ARRAY_JOB_ID" in environ:
        return f"slurm-{environ['SLURM_ARRAY_JOB_ID']}_{read_number(environ, 'SLURM_ARRAY_TASK_ID')}"
    return f"slurm-{environ['SLURM_JOB_ID']}"


def read_array_member(jobs: int, environ: Mapping[str, str] = os.environ) -> int | None:
    """The number of the sweep's job that this array member runs; None: there is no array, or this is a shell.

    Raises:
        ConfigError: the array has more members than the sweep has jobs.
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
    """The first host of a list: `dgx[03-05,09],login1` → `dgx03`. A container may lack Slurm's scontrol."""
    first = re.match(r"(?:[^,\[]|\[[^]]*\])+", hosts)
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0]) if first else hosts


def all_hosts(hosts: str) -> list[str]:
    """All hosts, in the order of Slurm's node numbers: `dgx[03-05,09],login1` → dgx03, dgx04, dgx05, dgx09, login1."""
    found = []
    for word in re.findall(r"(?:[^,\[]|\[[^]]*\])+", hosts):
        parts = re.split(r"\[([^]]*)\]", word)  # text, numbers, text …
        names = [""]
        for number, part in enumerate(parts):
            choices = _numbers(part) if number % 2 else [part]
            names = [name + choice for name in names for choice in choices]
        found += names
    return found


def _numbers(ranges: str) -> list[str]:
    """All numbers of some ranges: `03-05,09` → 03, 04, 05, 09."""
    found = []
    for word in ranges.split(","):
        first, _, last = word.partition("-")
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)] if last else [word]
    return found
