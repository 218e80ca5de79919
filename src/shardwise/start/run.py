"""Runs the jobs of a command one after the other: their records, their ranks, their end."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
from pathlib import Path

from shardwise.after_run import leave_report
from shardwise.config.compose import Job
from shardwise.errors import ConfigError, ExitCode, describe_error
from shardwise.launch.local import launch
from shardwise.metrics import prometheus
from shardwise.plan import Plan
from shardwise.plan.kernel_choice import explain_attention, explain_loss
from shardwise.plan.parallel_axes import explain_context
from shardwise.plan.plan import headline
from shardwise.plan.resolve import explain_unreached
from shardwise.process.report import report
from shardwise.run_dir.checkpoints import give_name_again, list_checkpoints, was_trained
from shardwise.run_dir.events import append_event, has_begun, note_begun, record_command
from shardwise.run_dir.files import (
    CONFIG,
    ENVIRONMENT,
    EVENTS,
    LOGS,
    PLAN,
    REPORT,
    keep_earlier,
    lock_run_dir,
    put_back,
    rank_logs,
    stage_file,
    tokenizer_folder,
    write_whole,
)
from shardwise.run_dir.resume import choose_again, resumption
from shardwise.run_dir.sweep import ended, report_sweep


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
    run_dir, is_first = Path(plan.run_dir), os.environ.get("RANK", "0") == "0"
    is_new = is_first and not run_dir.exists()
    earlier: dict[Path, Path] = {}  # record's path → new path of the earlier record that was there
    if is_first:
        try:
            plan, locked, notices = _write_records(job, plan, earlier)
        except OSError as error:
            if isinstance(error, FileExistsError) and run_dir.is_dir():
                note_begun(plan.run_dir, is_ours=False)
                raise ConfigError(f"{run_dir} already holds a run: give another name=") from None
            raise ConfigError(
                f"cannot write the run's folder {run_dir}: {error.strerror}; make room there or "
                f"grant permission, or give another runs_dir="
            ) from None
        choices = [*explain_loss(plan), *explain_attention(plan), *explain_context(plan)]
        print("\n".join([*job.messages, headline(plan), *choices, *explain_unreached(plan), *notices]), flush=True)
        if plan.stage == "fit":
            record_command(run_dir, job.overrides, launcher=plan.launcher, alone=single, locked=locked)
    saved = list_checkpoints(run_dir)
    try:
        code = launch(plan, in_process=single)
    except SystemExit as stopped:  # by a signal
        _end(plan, stopped.code if isinstance(stopped.code, int) else 1)
        raise
    finally:
        if plan.stage == "fit" and is_first:
            prometheus.remove(plan)  # rank 0 does this too, unless it was killed
    _end(plan, code)
    if code == 2 and list_checkpoints(run_dir) == saved:  # the run was refused: put the earlier records back
        for path, kept in earlier.items():
            put_back(path, kept)
    is_refused = code == 2 and _is_refused(run_dir, plan.stage)
    if is_new and (plan.quick_check or is_refused) and not _has_traceback(run_dir):
        shutil.rmtree(run_dir, ignore_errors=True)
    if is_new and plan.quick_check and code == 0:
        print("quick check: every stage that is defined has run; nothing is kept", flush=True)
    return code


def _write_records(job: Job, plan: Plan, earlier: dict[Path, Path]) -> tuple[Plan, bool, list[str]]:
    """Claim the run's folder, and write its records.

    Returns:
        The Plan, whether this process holds the lock of the folder, and lines for the user.

    Raises:
        OSError: the folder cannot be written, or is another run's.
    """
    run_dir = Path(plan.run_dir)
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
    return plan, locked, notices


def _end(plan: Plan, code: int) -> None:
    """Record how a run has ended, and write its report, unless it was refused before it trained anything."""
    if os.environ.get("RANK", "0") != "0":
        return
    if plan.stage != "fit":
        if code == 0 and (Path(plan.run_dir) / REPORT).exists():  # a test adds what it measured of classes
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
