"""One rank: reads the Plan that its parent resolved, and runs it. Never touches Hydra."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from shardwise.config.one_lightning import read_as_one
from shardwise.plan import Plan
from shardwise.process.console import keep_log, outlive_console
from shardwise.process.parent import PARENT, die_with_parent
from shardwise.process.report import report, send_report
from shardwise.process.scratch import use_scratch
from shardwise.process.signals import end_workers, ignore_save_signal, leave_at_once_on_ctrl_c

read_as_one()  # also in a data worker that starts anew: it imports this file first, then the user's


def run_rank(plan: Plan) -> int:
    """Run this process's rank and return its exit code. What went wrong is said once, whichever rank it was."""
    ignore_save_signal()
    if PARENT not in os.environ:
        leave_at_once_on_ctrl_c()
    outlive_console()
    for word, value in plan.environment.items():  # before torch, and with it NCCL, is there
        os.environ.setdefault(word, value)
    try:
        use_scratch()
        atexit.register(end_workers)
        keep_log(plan, send_report)
        from shardwise.rank import run

        run(plan)
    except Exception as error:
        return report(error, plan)
    return 0


def leave(code: int) -> NoReturn:
    """As a process of multiprocessing ends: what was asked to be run at exit is, and then it is over. The interpreter
    would take its modules apart, for seconds, and C++ threads that are still there abort it now and then."""
    with suppress(SystemExit):
        sys.exit(code)  # wandb takes note of it there
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads, as at any exit
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    ignore_save_signal()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training begins it ends the process, as the others do
    leave(run_rank(Plan.from_json(sys.stdin.read())))
