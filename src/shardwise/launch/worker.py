"""Runs one rank in its own process: reads the Plan that its parent made, and runs it, without Hydra."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from shardwise.config.one_lightning import read_as_one
from shardwise.plan import Plan
from shardwise.process.console import keep_log, outlive_console
from shardwise.process.parent import PARENT, die_with_parent
from shardwise.process.report import report, send_report
from shardwise.process.scratch import use_scratch
from shardwise.process.signals import end_workers, ignore_save_signal, leave_at_once_on_ctrl_c
from shardwise.run_dir.files import nccl_log

STANDBY = "SHARDWISE_STANDBY"  # set for a process that makes ready for a restart and waits for its Plan

read_as_one()  # a data worker that is spawned imports this file first too, and the user's code after it


def run_rank(plan: Plan) -> int:
    """Run this process's rank and return its exit code. An error is reported once for all ranks."""
    ignore_save_signal()
    if PARENT not in os.environ:
        leave_at_once_on_ctrl_c()
    outlive_console()
    set_environment(plan)  # this has to come before torch, and NCCL with it, is imported
    try:
        use_scratch()
        atexit.register(end_workers)
        keep_log(plan, send_report)
        from shardwise.rank import run

        run(plan)
    except Exception as error:
        return report(error, plan)
    return 0


def set_environment(plan: Plan) -> None:
    """Set the variables that the Plan names, unless the user has set them."""
    for word, value in plan.environment.items():
        os.environ.setdefault(word, value)
    if plan.debug.nccl != "off":
        os.environ.setdefault("NCCL_DEBUG_FILE", str(nccl_log(plan.run_dir, int(os.environ.get("RANK", "0")))))


def leave(code: int) -> NoReturn:
    """End this process as multiprocessing ends its own: run the exit handlers, then exit without finalizing.

    To finalize takes the interpreter seconds, and C++ threads that still run make it abort now and then.
    """
    with suppress(SystemExit):
        sys.exit(code)  # wandb replaces sys.exit to learn the exit code
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads, as at any exit
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    ignore_save_signal()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training begins it ends the process, as other signals do
    if os.environ.pop(STANDBY, None):
        with suppress(Exception):  # the rank itself says what is wrong
            import_module("shardwise.rank")
    leave(run_rank(Plan.from_json(sys.stdin.read())))
