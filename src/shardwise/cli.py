"""The order of things for train.py: say everything that is wrong, then start."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.checkpoint.find import (
    damage,
    keep_earlier,
    list_checkpoints,
    newest_whole,
    resolve_resume,
    stage_file,
    step_of,
    stopped_before,
    was_trained,
)
from shardwise.checkpoint.weights import list_weights
from shardwise.compose import Job, compose
from shardwise.errors import ConfigError, count
from shardwise.launch.host import inspect_host
from shardwise.launch.local import launch
from shardwise.launch.signals import overlook
from shardwise.launch.slurm import has_begun, job_folder, note, note_begun, read_array_member, read_task
from shardwise.launch.worker import die_with_parent, outlive_console, report
from shardwise.plan import Host, Plan, make_plan
from shardwise.sweep import report_sweep


def train(argv: list[str]) -> int:
    """`python train.py …`. Exit code: 0 done, 2 a user's mistake (one message on stderr), else the run's own."""
    code = _train(argv)
    if code == 0 and os.environ.get("RANK", "0") == "0":
        note("done", "")
    return code


def _train(argv: list[str]) -> int:
    outlive_console()
    overlook()
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
                told = "".join(f"# {line}\n" for line in job.told)
                print(f"{told}# config\n{job.yaml}\n# plan\n{plan.to_json()}")
            return 0
        check_targets(plans)
        # In a batch script's job it has been looked already
        if host.launcher == "local" and job_folder() is None and any(job.config.preflight for job in jobs):
            from shardwise.tools.preflight import run_alone

            if code := run_alone(argv, jobs[0].config):  # once, for all jobs of a sweep
                return code
        return start_all(jobs, plans)
    except KeyboardInterrupt:
        sys.stderr.write("shardwise: stopped by Ctrl-C\n")
        return 130
    except Exception as error:  # the user's own code has been imported, and his data made
        return report(error)


def make_run_plans(jobs: tuple[Job, ...], host: Host) -> tuple[tuple[Job, ...], list[Plan]]:
    """The jobs that are this process's, and their Plans with their checkpoints found. Each job of a sweep has a folder
    of its own. In a Slurm job array each member has one of them.

    Raises:
        ConfigError: of any of them, or a sweep that something else has started the ranks for.
    """
    member = read_array_member(len(jobs)) if len(jobs) > 1 else None
    if len(jobs) > 1 and member is None and host.launcher != "local":
        how = (
            "sbatch --array=0-{} …" if host.launcher == "slurm" else "python train.py -m devices=N …, without torchrun"
        )
        raise ConfigError(f"-m starts {len(jobs)} runs, and {host.launcher} has started the ranks of one: "
                          + how.format(len(jobs) - 1))  # fmt: skip
    plans = []
    for number, job in enumerate(jobs):
        plan = make_plan(job.config, host, job.clusters)
        if len(jobs) > 1 and (member is None or job.config.name is not None):  # an array's own id has the number
            plan = number_run(plan, number)
        if member in (None, number):
            plans.append(find_checkpoint(plan, host))
    return jobs if member is None else (jobs[member],), plans


def number_run(plan: Plan, number: int) -> Plan:
    """The Plan of one job of a sweep, with a folder of its own."""
    run_id = f"{plan.run_id}-{number}"
    return dataclasses.replace(plan, run_id=run_id, run_dir=str(Path(plan.run_dir).parent / run_id))


def find_checkpoint(plan: Plan, host: Host) -> Plan:
    """The Plan with the checkpoint that it goes on from. A requeued job goes on with its own run, unasked."""
    first = host.launcher == "local" or os.environ.get("RANK") == "0"  # which creates the directory
    resume, begun = plan.resume, has_begun(plan.run_dir)
    if begun and plan.stage == "fit" and (resume is None or newest_whole(plan.run_dir) is not None):
        plan = dataclasses.replace(plan, resume="auto", may_fall_back=True)
    plan = dataclasses.replace(plan, resume=resolve_resume(plan.resume, plan.run_dir, plan.stage, first and not begun))
    stop = _early_stop(plan)
    return plan if stop is None else dataclasses.replace(plan, max_steps=stop["step"])


def _early_stop(plan: Plan) -> dict[str, Any] | None:
    """The early stop that `resume=auto` has come back to, unless the callbacks are others now."""
    if plan.stage != "fit" or plan.resume is None or not plan.may_fall_back:
        return None
    stop = stopped_before(plan.run_dir, step_of(plan.resume))
    return stop if stop is not None and stop.get("callbacks") == plan.callbacks else None


def check_targets(plans: list[Plan]) -> None:
    """What only the user's classes and data can tell, before any worker starts."""
    from importlib.util import find_spec

    from lightning.pytorch import LightningDataModule, LightningModule
    from torch.optim import Optimizer

    from shardwise.build import build, check, locate
    from shardwise.callbacks.configured import check_callbacks
    from shardwise.loggers import check_loggers
    from shardwise.optimizers import try_optimizer
    from shardwise.ownership import check_ownership

    for plan in plans:
        check_weights(plan)
        if plan.strategy.zero_stage and find_spec("deepspeed") is None:
            raise ConfigError(
                f"strategy={plan.strategy.name} needs DeepSpeed, which is not installed: "
                f"pip install -r requirements-deepspeed.txt"
            )
        check(plan.module, "module", LightningModule)
        if plan.data is not None:
            check(plan.data, "data", LightningDataModule)
        check_callbacks(plan)
        check_loggers(plan)
        if plan.optimizer is not None:
            check(plan.optimizer, "optimizer", Optimizer, positional=1)  # the parameters
        if plan.schedule is not None:
            check(plan.schedule, "schedule", positional=1, supplied=("total_steps",))  # the step
        if isinstance(target := locate(plan.module["_target_"], "module"), type):
            check_ownership(plan, target)
        try_optimizer(plan)
        data = build(plan.data, "data")
        if os.environ.get("LOCAL_RANK", "0") == "0" and callable(getattr(data, "check", None)):
            data.check()


def check_weights(plan: Plan) -> None:
    """Whether there are files to start from, where the run is to."""
    from importlib.util import find_spec

    if plan.init_from is None or plan.resume is not None:
        return
    if find_spec("safetensors") is None:
        raise ConfigError("init_from needs safetensors, which is not installed: pip install -r requirements.txt")
    list_weights(Path(plan.init_from), f"init_from={plan.init_from}")


def start_all(jobs: tuple[Job, ...], plans: list[Plan]) -> int:
    """One run after the other; one that fails does not keep the others of its sweep from running."""
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


def start(job: Job, plan: Plan, single: bool) -> int:
    """Write down what will run, then run it."""
    run_dir = Path(plan.run_dir)
    fresh = not run_dir.exists()
    earlier: dict[Path, Path] = {}  # where the records of this run went that were there before
    if os.environ.get("RANK", "0") == "0":
        told = resumption(plan)
        records = {"config.yaml": job.yaml, "plan.json": plan.to_json()}
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            alone = hold(run_dir, plan.stage)
            begun = has_begun(plan.run_dir)
            note_begun(plan.run_dir)
            if plan.stage == "fit" and job.config.resume is None and not begun:
                # Of two runs that want one name, the first has it. A start that trained nothing keeps no name, where
                # it is certain that it is over.
                may_be_there = alone and not was_trained(run_dir)
                (run_dir / "plan.json").touch(exist_ok=may_be_there)
            for name, text in records.items():
                path = run_dir / stage_file(name, plan.stage)
                if (kept := keep_earlier(path, text)) is not None:
                    earlier[path] = kept
                path.write_text(text)
        except OSError as error:
            if isinstance(error, FileExistsError) and run_dir.is_dir():
                note_begun(plan.run_dir, is_ours=False)
                raise ConfigError(f"{run_dir} already holds a run: give another name=") from None
            raise ConfigError(
                f"cannot write the run's folder {run_dir}: {error.strerror}; give another runs_dir="
            ) from None
        print("\n".join([*job.told, headline(plan), *told]), flush=True)
    saved = list_checkpoints(run_dir)
    code = launch(plan, in_process=single)
    if code == 2 and list_checkpoints(run_dir) == saved:  # it never went on like this
        for path, kept in earlier.items():
            kept.replace(path)
    first = fresh and os.environ.get("RANK", "0") == "0"
    if first and not _has_traceback(run_dir) and (plan.quick_check or (code == 2 and _is_refused(run_dir, plan.stage))):
        shutil.rmtree(run_dir, ignore_errors=True)
    if first and plan.quick_check and code == 0:
        print("quick check: every stage that is defined has run; nothing is kept", flush=True)
    return code


def _is_refused(run_dir: Path, stage: str) -> bool:
    """Whether a folder holds nothing but the records of a start that was refused."""
    written = {stage_file(name, stage) for name in ("config.yaml", "plan.json", "environment.json")} | {"logs"}
    return {path.name for path in run_dir.glob("*")} <= written


def _has_traceback(run_dir: Path) -> bool:
    """Whether the user was sent to one of its logs."""
    logs = run_dir.glob("logs/rank-*.log")
    return any("Traceback (most recent call last)" in log.read_text(errors="replace") for log in logs)


_held: list[int] = []
_LOCK_SECONDS = 120


def hold(run_dir: Path, stage: str) -> bool:
    """A run's folder has one writer, for as long as this process lives. False: a file system that cannot tell."""
    if stage != "fit":
        return False
    held = os.open(run_dir, os.O_RDONLY)
    # A requeued job may begin while its last process dies on another node, or a server still keeps that one's lock
    deadline = time.monotonic() + (_LOCK_SECONDS if has_begun(str(run_dir)) else 0)
    while True:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(held)
                raise ConfigError(
                    f"{run_dir} is being written by a run that is still alive: stop it, or give another name="
                ) from None
            time.sleep(0.5)
        except OSError:
            os.close(held)
            return False
    _held.append(held)
    return True


def resumption(plan: Plan) -> list[str]:
    """What the user may not expect of a run that goes on: other values than its checkpoint's, or nothing to do.

    Raises:
        ConfigError: another run's samples would come, in another order, and nobody has said that they may.
    """
    if plan.resume is None:
        return []
    told = []
    if plan.init_from is not None:
        told.append(f"the weights are those of {Path(plan.resume).name}: init_from={plan.init_from} is not read")
    if plan.stage != "fit":
        return told
    if plan.may_fall_back:
        passed = [p for p in list_checkpoints(plan.run_dir) if step_of(p) > step_of(plan.resume)]
        told += [f"{path} is damaged: {damage(path)}; going on from {Path(plan.resume).name}" for path in passed]
    try:
        before = json.loads((Path(plan.resume).parents[1] / "plan.json").read_text())
    except (OSError, ValueError):
        before = {}
    now = json.loads(plan.to_json())
    for of_both in (before, now):
        data = of_both.get("data") or {}
        of_both["data"] = {key: value for key, value in data.items() if key not in _HOW_DATA_COMES}
    changed = list(differences({k: before[k] for k in _OF_A_RUN if k in before}, {k: now[k] for k in _OF_A_RUN}))
    if before.get("module") and changed:
        told.append("goes on with other values than its checkpoint was trained with: " + "; ".join(changed))
        for word in ("data", "global_batch_size", "seed"):
            lines = [line for line in changed if line.startswith((f"{word} ", f"{word}."))]
            if lines and word not in plan.resume_allow:
                raise ConfigError(
                    f"resume={plan.resume}: {'; '.join(lines)}: the run would not see the samples that it was to see; "
                    f"give the same {word}, or resume_allow=[{word}]"
                )
        if any(line.startswith(("optimizer", "schedule")) for line in changed):
            told.append("the checkpoint's optimizer state, its learning rate included, is kept")
    if (stop := _early_stop(plan)) is not None:
        told.append(
            f"nothing left to train: {stop['by']} stopped this run at step {stop['step']}; other values of callbacks.* "
            f"or resume={plan.resume} go on from there"
        )
    elif plan.max_steps is not None and step_of(plan.resume) >= plan.max_steps:
        told.append(f"nothing left to train: max_steps={plan.max_steps}, and {Path(plan.resume).name} is there already")
    return told


_OF_A_RUN = ("module", "data", "optimizer", "schedule", "seed", "global_batch_size", "gradient_clip_val", "ema_decay")
_HOW_DATA_COMES = ("batch_size", "num_workers", "prefetch_factor", "pin_memory", "persistent_workers")


def differences(before: Any, now: Any, key: str = "") -> Iterator[str]:
    """`key before → now` of every value that is another."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in before | now:
            yield from differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif before != now:
        yield f"{key} {json.dumps(before)} → {json.dumps(now)}"


def headline(plan: Plan) -> str:
    """What is about to run, in two lines."""
    topology = plan.topology
    mesh = " × ".join(f"{axis} {size}" for axis, size in topology.mesh.items() if size > 1) or "one rank"
    length = count(plan.max_steps, "step") if plan.max_steps else count(plan.max_epochs or 0, "epoch")
    if plan.stage == "fit":
        batches = (
            f"{length}, global batch {plan.global_batch_size} = {count(plan.micro_batch_size, 'sample')} × "
            f"{count(topology.data_parallel_size, 'rank')} × {count(plan.accumulate_grad_batches, 'micro-batch')}"
        )
    else:
        batches = "every sample once"
    begin = plan.resume or plan.init_from
    resumed = f", from {Path(begin).name}" if begin else ""
    return (
        f"run {plan.run_id}: {plan.stage} with {plan.strategy.name}, {plan.precision.name}, on "
        f"{count(topology.world_size, f'{plan.accelerator} rank')} ({mesh}){resumed}\n"
        f"{batches}; in {plan.run_dir}"
    )
