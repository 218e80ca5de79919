"""`python train.py …`: compose the config, make its Plans, check what they name, start the ranks."""

from __future__ import annotations

import os
import sys

from shardwise.config.compose import compose
from shardwise.launch.host import inspect_host
from shardwise.launch.slurm import read_task
from shardwise.process.report import outlive_console, report
from shardwise.process.signals import die_with_parent, ignore_save_signal
from shardwise.run_dir.events import job_folder, write_job_file
from shardwise.start.plans import make_run_plans, print_plans
from shardwise.start.run import report_array, start_all
from shardwise.start.targets import check_targets


def train(argv: list[str]) -> int:
    """Run `python train.py …`. Returns 0, 2 for a user's mistake (one message on stderr), or the run's exit code."""
    outlive_console()
    ignore_save_signal()
    try:
        code = _train(argv)
    except KeyboardInterrupt:
        sys.stderr.write("shardwise: stopped by Ctrl-C\n")
        code = 130
    except Exception as error:  # the user's own code was imported and its data built, so anything may be raised
        code = report(error)
    if code == 0 and os.environ.get("RANK", "0") == "0":
        write_job_file("done", "")
    return code


def _train(argv: list[str]) -> int:
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
        print_plans(jobs, plans, host)
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
