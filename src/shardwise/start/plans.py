"""Makes the Plans of a command, and prints them for a dry run."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.config.compose import Job
from shardwise.errors import ConfigError
from shardwise.launch.host import explain_planned, planned_host
from shardwise.launch.slurm import read_array_member
from shardwise.plan import Host, Plan
from shardwise.plan.parallel_axes import explain_context
from shardwise.plan.parallel_costs import explain_memory, parallel_lines
from shardwise.plan.resolve import explain_unreached, make_plan, number_run
from shardwise.run_dir.files import (
    check_folder,
)
from shardwise.run_dir.resume import find_checkpoint
from shardwise.weights.safetensors import check_weights


def make_run_plans(jobs: tuple[Job, ...], host: Host) -> tuple[tuple[Job, ...], list[Plan]]:
    """The jobs that this process runs, and their Plans with the checkpoints that they go on from.

    Each job of a sweep has a folder of its own. In a Slurm job array each member runs one job.

    Raises:
        ConfigError: a job cannot work, or torchrun or srun has started ranks for a sweep.
    """
    member = read_array_member(len(jobs)) if len(jobs) > 1 else None
    if len(jobs) > 1 and member is None and host.launcher != "local":
        how = (
            "sbatch --array=0-{} …" if host.launcher == "slurm" else "python train.py -m devices=N …, without torchrun"
        )
        raise ConfigError(f"-m starts {len(jobs)} runs, and {host.launcher} has started the ranks of one: "
                          + how.format(len(jobs) - 1))  # fmt: skip
    plans, is_dry = [], host.launcher == "local" and any(job.config.dry_run for job in jobs)
    for number, job in enumerate(jobs):
        plan = make_plan(job.config, planned_host(job.config, host) if is_dry else host, job.clusters)
        if len(jobs) > 1:
            plan = number_run(plan, number, in_array=member is not None and job.config.name is None)
        if member in (None, number):
            plans.append(find_checkpoint(plan, host))
    return jobs if member is None else (jobs[member],), plans


def print_plans(jobs: Sequence[Job], plans: Sequence[Plan], host: Host) -> None:
    """Print what a dry run shows: for each job notes for the user, the config and the Plan."""
    for job, plan in zip(jobs, plans, strict=True):
        check_weights(plan)
        check_folder(plan.run_dir)
        lines = [*job.messages, *explain_planned(job.config, plan, host), *explain_context(plan)]
        lines += [*explain_unreached(plan), *parallel_lines(plan), *explain_memory(plan, job.config.cluster)]
        notices = "".join(f"# {line}\n" for line in lines)
        print(f"{notices}# config\n{job.yaml}\n# plan\n{plan.to_json()}")
