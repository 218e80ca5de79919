"""Keeps a run alive when its standard output goes away, and keeps a log for each rank."""

from __future__ import annotations

import faulthandler
import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from io import TextIOWrapper
from typing import Any, cast

from shardwise.plan import Plan
from shardwise.process.watchdog import Watchdog
from shardwise.run_dir.files import rank_log


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
