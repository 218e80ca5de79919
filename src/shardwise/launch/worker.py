"""One rank: reads the Plan that its parent resolved, and runs it. Never touches Hydra."""

from __future__ import annotations

import ctypes
import errno
import json
import multiprocessing
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, cast

from shardwise.errors import ExitCode, OutOfMemoryError, RunStopped
from shardwise.plan import Plan

FAILURE = "SHARDWISE_FAILURE"  # the file in which the first rank to fail says what is wrong
PARENT = "SHARDWISE_PARENT"

PR_SET_PDEATHSIG = 1
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_PROCESS = os.getpid()  # of the rank: its data workers are forks


def run_rank(plan: Plan) -> int:
    """Run this process's rank and return its exit code. What went wrong is said once, whichever rank it was."""
    if PARENT not in os.environ:
        signal.signal(signal.SIGINT, _interrupted)
    outlive_console()
    try:
        from shardwise.trainer import run

        run(plan)
    except Exception as error:
        return report(error)
    return 0


def outlive_console() -> None:
    """From here on this process may lose its standard output and error, and goes on."""
    if not isinstance(sys.stdout, Console):
        sys.stdout, sys.stderr = cast(Any, Console(sys.stdout)), cast(Any, Console(sys.stderr))


class Console:
    """Standard output that may go away: a closed pipe or terminal ends the lines that are shown, not the run."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

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


def report(error: Exception) -> int:
    """Say what is wrong, unless another rank of this node did: the rest are its consequences. Returns the exit code."""
    code, text = ExitCode.user_error, f"error: {' '.join(str(error).split())}\n"
    if isinstance(error, RunStopped):
        code = error.exit_code
        text = f"error: {error}\n" if isinstance(error, OutOfMemoryError) else text
    # Lightning's own word for a user's mistake, e.g. two optimizers under automatic optimization; not imported for this
    elif type(error).__name__ != "MisconfigurationException":
        rank = f"rank {os.environ['RANK']}:\n" if os.environ.get("WORLD_SIZE", "1") != "1" else ""
        code, text = ExitCode.crash, rank + "".join(traceback.format_exception(error))
        if isinstance(error, OSError) and error.errno in _FULL:
            place = f" {error.filename2 or error.filename}" if error.filename else ""
            text = f"error: cannot write{place}: {error.strerror}; make room, then resume=auto\n"
    if FAILURE in os.environ:  # our launcher says it, unless another rank turns out to have died before
        _write_failure(Path(os.environ[FAILURE]), {"rank": int(os.environ["RANK"]), "code": code, "text": text})
    elif _speaks_under_torchrun():
        sys.stderr.write(text)
        sys.stderr.flush()
    return code


def _write_failure(path: Path, failure: dict[str, Any]) -> None:
    """`<path>.<pid>`: this rank has reported. `path`: what the first one reported, there at once or not at all."""
    own = path.with_suffix(f".{os.getpid()}")
    own.write_text(json.dumps(failure))
    with suppress(FileExistsError):
        os.link(own, path)


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


def _interrupted(number: int, frame: FrameType | None) -> None:
    # Not KeyboardInterrupt, which Lightning turns into exit code 1. Data workers are their rank's to end, at once:
    # one that is left to notice may print a traceback, and torch raises in this process when one is gone.
    if os.getpid() == _PROCESS:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for child in multiprocessing.active_children():
            child.kill()
        sys.stderr.write("shardwise: stopped by Ctrl-C\n")
        raise SystemExit(128 + number)


if __name__ == "__main__":
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is passed on by the launcher, which says so
    sys.exit(run_rank(Plan.from_json(Path(sys.argv[1]).read_text())))
