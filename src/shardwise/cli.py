"""What train.py does, in order: compose the config, make and check the Plans, start the ranks."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from shardwise.after_run import leave_report
from shardwise.config.compose import Job, compose
from shardwise.errors import ConfigError, ExitCode, describe_error
from shardwise.launch.host import explain_planned, inspect_host, planned_host
from shardwise.launch.local import launch
from shardwise.launch.nsight import check_profiler
from shardwise.launch.slurm import read_array_member, read_task
from shardwise.plan import Host, Plan, make_plan
from shardwise.plan.attention_kernel import check_takes_attention, explain_attention
from shardwise.plan.context_parallel import check_takes_context, explain_context
from shardwise.plan.location import number_run
from shardwise.plan.loss import check_takes_loss, explain_loss
from shardwise.plan.parallel_lines import explain_memory, parallel_lines
from shardwise.plan.pipeline import check_stages
from shardwise.plan.plan import headline
from shardwise.plan.unreached import explain_unreached
from shardwise.process.console import outlive_console
from shardwise.process.parent import die_with_parent
from shardwise.process.report import report
from shardwise.process.signals import ignore_save_signal
from shardwise.protocols import optional
from shardwise.run_dir import prometheus_files
from shardwise.run_dir.checkpoints import give_name_again, list_checkpoints, was_trained
from shardwise.run_dir.command import record_command
from shardwise.run_dir.events import append_event
from shardwise.run_dir.files import (
    CONFIG,
    ENVIRONMENT,
    EVENTS,
    LOGS,
    PLAN,
    REPORT,
    check_folder,
    keep_earlier,
    lock_run_dir,
    put_back,
    rank_logs,
    stage_file,
    tokenizer_folder,
    write_whole,
)
from shardwise.run_dir.job_folder import has_begun, job_folder, note_begun, write_job_file
from shardwise.run_dir.resume import choose_again, find_checkpoint, resumption
from shardwise.run_dir.sweep import ended, report_sweep
from shardwise.weights.safetensors import check_weights


def train(argv: list[str]) -> int:
    """Run `python train.py …`. Returns 0, 2 for a user's mistake (one message on stderr), or the run's exit code."""
    code = _train(argv)
    if code == 0 and os.environ.get("RANK", "0") == "0":
        write_job_file("done", "")
    return code


def _train(argv: list[str]) -> int:
    outlive_console()
    ignore_save_signal()
    try:
        command = compose(argv)
        if command.print is not None:
            print(command.print)
            return 0
        host = inspect_host()
        if host.launcher == "slurm" and (task := read_task()) is not None:
            os.environ |= task.environment()
        if host.launcher == "torchrun":
            die_with_parent()
        jobs, plans = make_run_plans(command.jobs, host)
        if any(job.config.dry_run for job in jobs):
            for job, plan in zip(jobs, plans, strict=True):
                check_weights(plan)
                check_folder(plan.run_dir)
                lines = [*job.messages, *explain_planned(job.config, plan, host), *explain_context(plan)]
                lines += [*explain_unreached(plan), *parallel_lines(plan), *explain_memory(plan, job.config.cluster)]
                notices = "".join(f"# {line}\n" for line in lines)
                print(f"{notices}# config\n{job.yaml}\n# plan\n{plan.to_json()}")
            return 0
        plans = check_targets(plans, jobs)
        # In a job of our batch script the preflight has run already
        if host.launcher == "local" and job_folder() is None and any(job.config.preflight for job in jobs):
            from shardwise.preflight.run import run_alone

            if code := run_alone(argv, jobs[0].config):  # once, for all jobs of a sweep
                return code
        code = start_all(jobs, plans)
        if len(jobs) < len(command.jobs) and os.environ.get("RANK", "0") == "0":
            report_array(command.jobs, plans[0], code)
        return code
    except KeyboardInterrupt:
        sys.stderr.write("shardwise: stopped by Ctrl-C\n")
        return 130
    except Exception as error:  # the user's own code was imported and its data built, so anything may be raised
        return report(error)


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


def check_targets(plans: list[Plan], jobs: Sequence[Job] = ()) -> list[Plan]:
    """Check what depends on the user's classes and data, before any rank starts.

    Returns:
        The Plans, with what follows from the module's class.
    """
    from importlib.util import find_spec

    from lightning.pytorch import LightningDataModule, LightningModule
    from torch.optim import Optimizer

    from shardwise.callbacks.configured import check_callbacks
    from shardwise.config.targets import build, check, locate
    from shardwise.metrics.loggers import check_loggers
    from shardwise.optim.optimizers import try_optimizer
    from shardwise.optim.ownership import check_ownership

    made = []
    for plan, job in zip_longest(plans, jobs):
        check_weights(plan)
        check_profiler(plan)
        if (package := plan.strategy.capabilities.package) and find_spec(package.lower()) is None:
            raise ConfigError(
                f"strategy={plan.strategy.name} needs {package}, which is not installed: "
                f"pip install -r requirements-{package.lower()}.txt"
            )
        if plan.precision.fp8 is not None and find_spec("torchao") is None:
            raise ConfigError("precision=fp8 needs torchao, which is not installed: pip install -e '.[torchao]'")
        if plan.data is not None:
            check(plan.data, "data", LightningDataModule)
        target, data = locate(plan.module["_target_"], "module"), build(plan.data, "data")
        is_given = job is not None and any(".vocab_size=" in word for word in job.overrides)
        if (link := optional(target, "link_arguments")) is not None and not is_given:
            plan = dataclasses.replace(plan, module=link(plan.module, data))
        check(plan.module, "module", LightningModule)
        check_callbacks(plan)
        check_loggers(plan)
        if plan.optimizer is not None:
            check(plan.optimizer, "optimizer", Optimizer, positional=1)  # the argument is the parameters
        if plan.schedule is not None:
            check(plan.schedule, "schedule", positional=1, supplied=("total_steps",))  # the argument is the step
        if isinstance(target, type):
            check_ownership(plan, target)
            plan, line = check_stages(plan, target)
            if line is not None and os.environ.get("RANK", "0") == "0":
                print(line, flush=True)
            plan = check_takes_loss(plan, target)
            plan = check_takes_attention(plan, target)
            check_takes_context(plan, target)
        made.append(plan)
        try_optimizer(plan)
        if os.environ.get("RANK", "0") == "0":
            prometheus_files.check_directory(plan)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            if plan.topology.tensor * plan.topology.pipeline > 1:
                from shardwise.trainer import check_layers

                check_layers(plan)
            if (check_data := optional(data, "check")) is not None:
                check_data()
            if (check_fit := optional(target, "check_data")) is not None:
                check_fit(plan.module, data)
    return made


def start_all(jobs: tuple[Job, ...], plans: list[Plan]) -> int:
    """Start one run after the other. A run that fails does not keep the others of its sweep from running."""
    codes = []
    for number, (job, plan) in enumerate(zip(jobs, plans, strict=True)):
        if len(jobs) > 1:
            print(f"\n[{number + 1}/{len(jobs)}] {' '.join(job.overrides)}", flush=True)
        try:
            codes.append(start(job, plan, single=len(jobs) == 1))
        except ConfigError as error:
            codes.append(report(error))
    if len(jobs) > 1 and plans[0].stage == "fit" and not plans[0].quick_check:
        print(report_sweep([job.overrides for job in jobs], plans, codes), flush=True)
    failed = [f"{plan.run_id} (exit code {code})" for code, plan in zip(codes, plans, strict=True) if code]
    if failed and len(jobs) > 1:
        sys.stderr.write(f"shardwise: {len(failed)} of {len(jobs)} runs failed: {', '.join(failed)}\n")
    return max(codes)


def report_array(jobs: tuple[Job, ...], plan: Plan, code: int) -> None:
    """Print the table of a sweep from the member of its job array that ends: the last one prints all of it."""
    if plan.stage != "fit" or plan.quick_check or code == ExitCode.saved:  # it goes on
        return
    base, own = re.sub(r"\d+$", "", plan.run_id), Path(plan.run_dir)
    ids = [f"{base}{number}" for number in range(len(jobs))]
    plans = [dataclasses.replace(plan, run_id=one, run_dir=str(own.parent / one)) for one in ids]
    codes = [code if one.run_id == plan.run_id else ended(one) for one in plans]
    try:
        print(report_sweep([job.overrides for job in jobs], plans, codes), flush=True)
    except Exception as error:  # the run itself has ended, and its exit code is what counts
        print(f"the table of the sweep cannot be made: {describe_error(error)}", flush=True)


def start(job: Job, plan: Plan, single: bool) -> int:
    """Write the run's records, then run it. Returns the exit code."""
    run_dir = Path(plan.run_dir)
    fresh = not run_dir.exists()
    earlier: dict[Path, Path] = {}  # record's path → new path of the earlier record that was there
    if os.environ.get("RANK", "0") == "0":
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            begun = has_begun(plan.run_dir)
            locked = lock_run_dir(run_dir, plan.stage, is_requeued=begun)
            if plan.stage == "fit":
                give_name_again(run_dir)
            plan = choose_again(plan)  # the process that had the lock may have saved once more
            notices = resumption(plan, job.config.resume)
            note_begun(plan.run_dir)
            if plan.stage == "fit" and job.config.resume is None and not begun:
                # Of two runs with one name the first gets it. An earlier start that trained nothing gives the name
                # up, if the lock shows that it is over.
                may_be_there = locked and not was_trained(run_dir)
                (run_dir / PLAN).touch(exist_ok=may_be_there)
            for name, text in {CONFIG: job.yaml, PLAN: plan.to_json()}.items():
                path = run_dir / stage_file(name, plan.stage)
                if (kept := keep_earlier(path, text)) is not None:
                    earlier[path] = kept
                write_whole(path, text)
        except OSError as error:
            if isinstance(error, FileExistsError) and run_dir.is_dir():
                note_begun(plan.run_dir, is_ours=False)
                raise ConfigError(f"{run_dir} already holds a run: give another name=") from None
            raise ConfigError(
                f"cannot write the run's folder {run_dir}: {error.strerror}; make room there or "
                f"grant permission, or give another runs_dir="
            ) from None
        choices = [*explain_loss(plan), *explain_attention(plan), *explain_context(plan)]
        notices = [*explain_unreached(plan), *notices]
        print("\n".join([*job.messages, headline(plan), *choices, *notices]), flush=True)
        if plan.stage == "fit":
            record_command(run_dir, job.overrides, launcher=plan.launcher, alone=single, locked=locked)
    saved = list_checkpoints(run_dir)
    try:
        code = launch(plan, in_process=single)
    except SystemExit as stopped:  # by a signal
        _end(plan, stopped.code if isinstance(stopped.code, int) else 1)
        raise
    finally:
        if plan.stage == "fit" and os.environ.get("RANK", "0") == "0":
            prometheus_files.remove(plan)  # rank 0 does this too, unless it was killed
    _end(plan, code)
    if code == 2 and list_checkpoints(run_dir) == saved:  # the run was refused: put the earlier records back
        for path, kept in earlier.items():
            put_back(path, kept)
    first = fresh and os.environ.get("RANK", "0") == "0"
    if first and not _has_traceback(run_dir) and (plan.quick_check or (code == 2 and _is_refused(run_dir, plan.stage))):
        shutil.rmtree(run_dir, ignore_errors=True)
    if first and plan.quick_check and code == 0:
        print("quick check: every stage that is defined has run; nothing is kept", flush=True)
    return code


def _end(plan: Plan, code: int) -> None:
    """Record how a run has ended, and write its report, unless it was refused before it trained anything."""
    if os.environ.get("RANK", "0") != "0":
        return
    if plan.stage != "fit":
        if (
            code == 0 and (Path(plan.run_dir) / REPORT).exists()
        ):  # what a test has measured of classes stands there, too
            leave_report(plan.run_dir)
        return
    append_event(plan.run_dir, "end", None, f"the run ended with exit code {code}", exit_code=code)
    if not plan.quick_check and (code != ExitCode.user_error or was_trained(plan.run_dir)):
        line = leave_report(plan.run_dir)
        if line and (code == 0 or not line.startswith("report: ")):  # else the error is the last that the user reads
            print(line, flush=True)


def _is_refused(run_dir: Path, stage: str) -> bool:
    """Whether a run's folder holds only the records of a start that was refused."""
    written = {stage_file(name, stage) for name in (CONFIG, PLAN, ENVIRONMENT)}
    written |= {EVENTS, LOGS, tokenizer_folder(run_dir).name}
    return {path.name for path in run_dir.glob("*")} <= written


def _has_traceback(run_dir: Path) -> bool:
    """Whether one of the run's logs has a traceback that the user was told to read."""
    return any("Traceback (most recent call last)" in log.read_text(errors="replace") for log in rank_logs(run_dir))
