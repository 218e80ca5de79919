"""One rank: reads the Plan that its parent resolved, and runs it. Never touches Hydra."""

from __future__ import annotations

import atexit
import ctypes
import errno
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, cast

from shardwise.errors import ExitCode, Left, OutOfMemoryError, RunStopped
from shardwise.launch.mistakes import tell, would_fail_again
from shardwise.launch.scratch import use_scratch
from shardwise.launch.signals import end_workers, leave_at_once_on_ctrl_c, overlook
from shardwise.launch.slurm import is_first_to_end
from shardwise.launch.watchdog import Watchdog, progress, rank_log
from shardwise.one_lightning import read_as_one
from shardwise.plan import Plan

REPORT = "SHARDWISE_REPORT"  # the file descriptor on which this rank says what went wrong
PARENT = "SHARDWISE_PARENT"

read_as_one()  # also in a data worker that starts anew: it imports this file first, then the user's

PR_SET_PDEATHSIG = 1
_MOST = 15_000  # characters of a report, its last: a pipe that nobody reads yet holds 65,536 bytes
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def run_rank(plan: Plan) -> int:
    """Run this process's rank and return its exit code. What went wrong is said once, whichever rank it was."""
    overlook()
    if PARENT not in os.environ:
        leave_at_once_on_ctrl_c()
    outlive_console()
    for word, value in plan.environment.items():  # before torch, and with it NCCL, is there
        os.environ.setdefault(word, value)
    try:
        use_scratch()
        atexit.register(end_workers)
        keep_log(plan)
        from shardwise.trainer import run

        run(plan)
    except Exception as error:
        return report(error, plan)
    return 0


_console: Any = None  # where the user looks, if this rank's own messages go into a file


def keep_log(plan: Plan) -> None:
    """`logs/rank-N.log`: what C libraries print (NCCL, the allocator, a crash) and, but for rank 0, everything else.

    SIGQUIT writes every thread's Python stack there, and the run goes on.
    """
    global _console
    rank = int(os.environ.get("RANK", "0"))
    path = rank_log(plan.run_dir, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("a", buffering=1)
    except OSError:  # what cannot be written now is said when it is needed: at a save
        return
    log.write(f"{time.strftime('%F %T')} rank {rank} on {os.uname().nodename}, process {os.getpid()}\n")
    if plan.topology.world_size > 1:
        _console = cast(Any, Console(os.fdopen(os.dup(2), "w", buffering=1)))
        if rank == 0:
            sys.stderr = _console
        else:
            os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGQUIT, log, all_threads=True)
    minutes = plan.strategy.timeout_minutes
    Watchdog(plan.run_dir, rank, plan.topology.world_size, minutes, _say)


def outlive_console() -> None:
    """From here on this process may lose its standard output and error, and goes on."""
    if not isinstance(sys.stdout, Console):
        sys.stdout, sys.stderr = cast(Any, Console(sys.stdout)), cast(Any, Console(sys.stderr))


class Console:
    """Standard output that may go away: a closed pipe or terminal ends the lines that are shown, not the run."""

    def __init__(self, stream: Any) -> None:
        # None: it was closed from the start
        self.stream = open(os.devnull, "w") if stream is None else stream  # noqa: SIM115

    def write(self, text: str) -> int:
        try:
            return int(self.stream.write(text))
        except OSError:
            return self._gone(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError:
            self._gone("")

    def _gone(self, text: str) -> int:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def report(error: Exception, plan: Plan | None = None) -> int:
    """Say what is wrong, unless another rank of this node did: the rest are its consequences. Returns the exit code.

    `plan`: of the run that this process is a rank of; None: none has begun.
    """
    is_alone = False  # the other ranks do not come to the same
    code, text = int(ExitCode.user_error), f"error: {' '.join(str(error).split())}\n"
    if isinstance(error, RunStopped):
        code = int(error.exit_code)
        if isinstance(error, OutOfMemoryError):
            text = f"error: {error}\n"
        elif isinstance(error, Left):
            text = f"shardwise: {error}\n"
    elif not _is_lightnings_message(error):
        if isinstance(error, OSError) and error.errno in _FULL:
            place = f" {error.filename2 or error.filename}" if error.filename else ""
            code, text = (
                int(ExitCode.crash),
                (f"error: cannot write{place}: {error.strerror}; make room, then resume=auto\n"),
            )
        elif (mistake := tell(error, None if plan is None else plan.module["_target_"].partition(".")[0])) is not None:
            trained = plan is not None and plan.stage == "fit" and (plan.resume is not None or progress.trained)
            code = int(ExitCode.crash if trained or not would_fail_again(error) else ExitCode.user_error)
            text = mistake if plan is None else mistake + _keep_traceback(error, plan)
            is_alone = True
        else:
            rank = f"rank {os.environ['RANK']}:\n" if os.environ.get("WORLD_SIZE", "1") != "1" else ""
            code, text = int(ExitCode.crash), rank + "".join(traceback.format_exception(error))
            # What another rank says goes into its log by itself
            if plan is not None and (not rank or os.environ["RANK"] == "0"):
                text += _keep_traceback(error, plan)
    _say(code, text, is_alone)
    return code


def _is_lightnings_message(error: Exception) -> bool:
    """Lightning says what the user has done wrong: e.g. that EarlyStopping's metric is logged by nobody."""
    misconfigured = type(error).__name__ == "MisconfigurationException"  # not imported for this
    return misconfigured or str(error).startswith("Early stopping conditioned on metric")


def _keep_traceback(error: Exception, plan: Plan) -> str:
    """Into this rank's log; returns the line that says where it is."""
    path = rank_log(plan.run_dir, int(os.environ.get("RANK", "0")))
    try:
        with path.open("a") as log:
            log.write("".join(traceback.format_exception(error)))
    except OSError:
        return ""
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"  the whole traceback is in {shown}\n"


def _say(code: int, text: str, is_alone: bool = False) -> None:
    if REPORT in os.environ:  # our launcher says it, unless another rank turns out to have died before
        told = {"time": time.monotonic(), "code": int(code), "text": text[-_MOST:], "alone": is_alone}
        with suppress(OSError):
            os.write(
                int(os.environ[REPORT]), (json.dumps(told, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
            )
        if os.environ["RANK"] != "0":
            sys.stderr.write(text)  # into its log
    elif _speaks_under_torchrun() and is_first_to_end(int(code), text):
        console = _console or sys.stderr
        console.write(text)
        console.flush()


def _speaks_under_torchrun() -> bool:
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # <folder of this start>/<local rank>/error.json
    if not error_file:
        return True
    try:
        (Path(error_file).parents[1] / "said").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die_with_parent() -> None:
    """A rank whose launcher is killed, even by SIGKILL, is killed too."""
    kill_with_parent()
    if os.environ.get(PARENT) not in (None, str(os.getppid())):
        sys.exit("shardwise: the launcher is gone")


def kill_with_parent() -> None:
    """Linux: this process gets SIGKILL when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


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
    overlook()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training begins it ends the process, as the others do
    leave(run_rank(Plan.from_json(sys.stdin.read())))
