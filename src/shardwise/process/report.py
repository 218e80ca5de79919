"""What a process prints: it outlives its console, keeps a log for each rank, and reports once what went wrong."""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, cast

from shardwise.errors import ExitCode, Left, OutOfMemoryError, RunStopped, class_name
from shardwise.mistakes import describe_mistake, would_fail_again
from shardwise.plan import Plan
from shardwise.process.watchdog import Watchdog, progress
from shardwise.run_dir.checkpoints import newest_whole
from shardwise.run_dir.events import append_event, claim_exit_code
from shardwise.run_dir.files import rank_log

# Reports what went wrong, once for all ranks of a run, and chooses the exit code.

REPORT = "SHARDWISE_REPORT"  # this variable holds the file descriptor on which this rank reports what went wrong
_MOST = 15_000  # a report's last characters that are sent: a pipe that nobody reads yet holds 65,536 bytes
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def report(error: Exception, plan: Plan | None = None) -> int:
    """Report an error, unless another rank of this node has reported one: later errors are its consequences.

    `plan`: the run's, where this process is one of its ranks; None: no run has begun. Returns the exit code.
    """
    is_alone = False  # whether this error is this rank's alone: the other ranks do not raise it too
    code, text = int(ExitCode.user_error), f"error: {' '.join(str(error).split())}\n"
    if isinstance(error, RunStopped):
        code = int(error.exit_code)
        if isinstance(error, OutOfMemoryError):
            text = f"error: {error}\n"
        elif isinstance(error, Left):
            text = f"shardwise: {error}\n"
    elif not _is_lightnings_message(error):
        if isinstance(error, OSError) and (error.errno in _FULL or _is_of_runs_disk(error, plan)):
            path = f" {error.filename2 or error.filename}" if error.filename else ""
            code, goes_on = int(ExitCode.crash), "resume=auto" if plan is None else plan.goes_on_by
            remedy = "make room" if error.errno in _FULL else "mend its disk"
            text = f"error: cannot write{path}: {error.strerror}; {remedy}, then {goes_on}\n"
        elif (mistake := describe_mistake(error, _package(plan), class_name)) is not None:
            trained = plan is not None and plan.stage == "fit" and (plan.resume is not None or progress.trained)
            code = int(ExitCode.crash if trained or not would_fail_again(error) else ExitCode.user_error)
            goes_on = _how_to_go_on(plan)
            text = mistake + (f"  {goes_on}\n" if goes_on else "")
            text += "" if plan is None else _keep_traceback(error, plan)
            is_alone = True
        else:
            rank = f"rank {os.environ['RANK']}:\n" if os.environ.get("WORLD_SIZE", "1") != "1" else ""
            code, text = int(ExitCode.crash), rank + "".join(traceback.format_exception(error))
            # Another rank's message goes into its own log anyway
            if plan is not None and (not rank or os.environ["RANK"] == "0"):
                text += _keep_traceback(error, plan)
    if code == ExitCode.user_error and (goes_on := _how_to_go_on(plan)) and goes_on not in text:
        text = f"{text.rstrip().rstrip('.')}; {goes_on}\n"
    send_report(code, text, is_alone)
    if plan is not None and plan.stage == "fit":
        append_event(plan.run_dir, "error", None, text[-_MOST:].strip(), rank=int(os.environ.get("RANK", "0")))
    return code


def _is_of_runs_disk(error: OSError, plan: Plan | None) -> bool:
    """Whether the disk of the run's folder, or the server that it is on, does not work."""
    is_own = plan is not None and Path(str(error.filename)).is_relative_to(plan.run_dir)
    return is_own and error.errno in (errno.EIO, errno.ESTALE)


def _how_to_go_on(plan: Plan | None) -> str:
    """What is left of a run that a mistake has ended in mid-training, in words; "" if it has trained nothing."""
    if plan is None or plan.stage != "fit" or plan.quick_check or not progress.trained:
        return ""
    if (newest := newest_whole(plan.run_dir)) is not None:
        return f"{plan.goes_on_by} goes on from {newest.name}"
    if not plan.checkpoint.saves:
        return "nothing was saved, as checkpoint=none asks for: another name= begins anew"
    return f"no checkpoint was saved yet: {plan.goes_on_by} begins anew"


def _package(plan: Plan | None) -> str | None:
    """The top-level package of the run's module."""
    return None if plan is None else str(plan.module["_target_"]).partition(".")[0]


def _is_lightnings_message(error: Exception) -> bool:
    """Whether Lightning tells the user about a mistake, such as a metric of EarlyStopping that nobody logs."""
    misconfigured = type(error).__name__ == "MisconfigurationException"  # compared by name: Lightning is not imported
    return misconfigured or str(error).startswith("Early stopping conditioned on metric")


def _keep_traceback(error: Exception, plan: Plan) -> str:
    """Write the traceback into this rank's log; returns the line that names the log."""
    path = rank_log(plan.run_dir, int(os.environ.get("RANK", "0")))
    try:
        with path.open("a", encoding="utf-8", errors="backslashreplace") as log:
            log.write("".join(traceback.format_exception(error)))
    except OSError:
        return ""
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"  the whole traceback is in {shown}\n"


def send_report(code: int, text: str, is_alone: bool = False) -> None:
    """Send a message to our launcher, or print it if no other rank of this node has printed one."""
    if REPORT in os.environ:  # our launcher prints it, unless it finds that another rank died before
        message = {"time": time.monotonic(), "code": int(code), "text": text[-_MOST:], "alone": is_alone}
        with suppress(OSError):
            os.write(
                int(os.environ[REPORT]),
                (json.dumps(message, ensure_ascii=False) + "\n").encode(errors="backslashreplace"),
            )
        if os.environ["RANK"] != "0":
            sys.stderr.write(text)  # other ranks than 0 have their log there
    elif _speaks_under_torchrun() and claim_exit_code(int(code), text):
        console().write(text)
        console().flush()


def _speaks_under_torchrun() -> bool:
    """Whether this is the first rank of this start and node to report; without torchrun, always."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # <folder of this start>/<local rank>/error.json
    if not error_file:
        return True
    try:
        (Path(error_file).parents[1] / "said").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


# Keeps a run alive when its standard output goes away, and keeps a log for each rank.


def show_anything() -> None:
    """Let standard output and error show `?` for a character that their encoding lacks: it would be an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def outlive_console() -> None:
    """Let this process go on when it loses its standard output or error, or they cannot show a character."""
    show_anything()
    if not isinstance(sys.stdout, Console):
        sys.stdout, sys.stderr = cast(Any, Console(sys.stdout)), cast(Any, Console(sys.stderr))


class Console:
    """A stream that may go away: after its pipe or terminal is closed nothing is shown, and the run goes on.

    It may be a file on a disk that is full: what finds no room is lost, and what comes later may find some.
    """

    def __init__(self, stream: Any) -> None:
        # The stream is None if it was closed from the start
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
        if not stat.S_ISREG(os.fstat(self.stream.fileno()).st_mode):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


_console: Any = None  # the stream that the user sees, where this rank's own messages go into a file


def console() -> Any:
    """The stream that the user sees."""
    return _console or sys.stderr


def keep_log(plan: Plan, report_hang: Callable[[int, str], None]) -> None:
    """Open `logs/rank-N.log` and start the watchdog.

    The log gets what C libraries print (NCCL, the allocator, a crash), and except on rank 0 everything else. SIGQUIT
    writes every thread's Python stack there, and the run goes on. A watchdog calls `report_hang(exit code,
    message)` when the run makes no progress.
    """
    global _console
    rank = int(os.environ.get("RANK", "0"))
    path = rank_log(plan.run_dir, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = cast(Any, Console(path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")))
    except OSError:  # a folder that cannot be written to is reported at the next save
        return
    log.write(f"{time.strftime('%F %T')} rank {rank} on {os.uname().nodename}, process {os.getpid()}\n")
    if plan.topology.world_size > 1:
        _console = cast(
            Any,
            Console(os.fdopen(os.dup(2), "w", buffering=1, encoding=sys.stderr.encoding, errors="replace")),
        )
        if rank == 0:
            sys.stderr = _console
        else:
            os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGQUIT, log, all_threads=True)
    minutes = plan.strategy.timeout_minutes
    Watchdog(plan.run_dir, rank, plan.topology.world_size, minutes, report_hang)
