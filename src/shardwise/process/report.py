"""What went wrong, said once, whichever rank it was. Returns the exit code."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from shardwise.errors import ExitCode, Left, OutOfMemoryError, RunStopped
from shardwise.mistakes import tell, would_fail_again
from shardwise.plan import Plan
from shardwise.process.console import console
from shardwise.process.watchdog import progress
from shardwise.run_dir.files import rank_log
from shardwise.run_dir.job_folder import claim_exit_code

REPORT = "SHARDWISE_REPORT"  # the file descriptor on which this rank says what went wrong
_MOST = 15_000  # characters of a report, its last: a pipe that nobody reads yet holds 65,536 bytes
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


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
    send_report(code, text, is_alone)
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


def send_report(code: int, text: str, is_alone: bool = False) -> None:
    if REPORT in os.environ:  # our launcher says it, unless another rank turns out to have died before
        told = {"time": time.monotonic(), "code": int(code), "text": text[-_MOST:], "alone": is_alone}
        with suppress(OSError):
            os.write(
                int(os.environ[REPORT]), (json.dumps(told, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
            )
        if os.environ["RANK"] != "0":
            sys.stderr.write(text)  # into its log
    elif _speaks_under_torchrun() and claim_exit_code(int(code), text):
        console().write(text)
        console().flush()


def _speaks_under_torchrun() -> bool:
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # <folder of this start>/<local rank>/error.json
    if not error_file:
        return True
    try:
        (Path(error_file).parents[1] / "said").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
