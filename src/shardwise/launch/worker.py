"""Runs one rank in its own process: reads the Plan that its parent made, and runs it, without Hydra."""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from shardwise.config.targets import read_as_one
from shardwise.plan import Plan
from shardwise.process.report import keep_log, outlive_console, report, send_report
from shardwise.process.signals import PARENT, die_with_parent, end_workers, ignore_save_signal, leave_at_once_on_ctrl_c
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


# Gives multiprocessing a folder for its sockets that the next start on the machine removes.
#
# Python's own folder for them stays when a process is killed.

_NAME = "shardwise-scratch-{}-"  # with the number of the process
_WHOLE = re.compile(r"shardwise-scratch-(\d+)-[a-z0-9_]{8}")


def use_scratch() -> None:
    """Use a folder of ours in this process and its forks, and remove the folders that killed processes have left."""
    remove_abandoned()
    with suppress(OSError):  # with a full /tmp, Python's own folder is used
        folder = tempfile.mkdtemp(prefix=_NAME.format(os.getpid()))
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # the lock lasts until this process and its forks are gone
        multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def remove_abandoned(patience: float = 0.0) -> None:
    """Remove the folders of processes that are gone. `patience`: seconds to wait for their forks to end as well."""
    deadline = time.monotonic() + patience
    while not all(list(map(_remove, Path(tempfile.gettempdir()).glob(_NAME.format("*") + "*")))):
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _remove(folder: Path) -> bool:
    """Remove a folder whose process is gone. Returns False if it should be tried again."""
    found = _WHOLE.fullmatch(folder.name)
    with suppress(OSError):
        if not found or folder.stat().st_uid != os.getuid() or Path(f"/proc/{found[1]}").exists():
            return True
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            # The lock fails if the process is alive in another container, where it has another number
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
    return not folder.exists()


if __name__ == "__main__":
    ignore_save_signal()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training begins it ends the process, as other signals do
    if os.environ.pop(STANDBY, None):
        with suppress(Exception):  # the rank itself says what is wrong
            import_module("shardwise.rank")
    leave(run_rank(Plan.from_json(sys.stdin.read())))
