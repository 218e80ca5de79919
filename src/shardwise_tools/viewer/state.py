"""Says whether a run is under way, has ended or has died, from its folder alone."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardwise.errors import ExitCode, count
from shardwise.run_dir.events import Event, redact_text, this_machine
from shardwise.run_dir.files import EVENTS, METRICS, PLAN, STARTS, SUMMARY, rank_logs
from shardwise_tools.viewer.record import RunRecord

Name = Literal["starting", "running", "silent", "ended", "stopped", "died"]
_SILENT_SECONDS = 300.0  # without a sign of life for so long, a run of another machine may be gone
_ROWS = 20  # or for so many times the usual time between two rows


@dataclass(frozen=True)
class State:
    """How a run is."""

    name: Name
    text: str  # a sentence for the user

    @property
    def is_over(self) -> bool:
        return self.name in ("ended", "stopped", "died")

    @property
    def exit_code(self) -> int:
        """Of a tool that reports the state: 1 where the run has died."""
        return int(self.name == "died")


def state_of(run: RunRecord, now: float | None = None) -> State:
    """The state of a run. `now`: seconds since 1970."""
    now = time.time() if now is None else now
    holder = lock_holder(run.path)
    last = run.last_event("command", "start", "restart", "end")
    started = max([*run.starts, last.time if last is not None and last.kind != "end" else 0.0])
    age = max(0.0, now - last_sign(run.path))
    if last is not None and last.kind == "end" and last.time >= started - 1:  # its launcher may still hold the lock
        return _ended(run, last)
    if holder is not None:
        return _alive(run, started)
    if last is None and time_of(run.path / SUMMARY) > started and run.summary:
        return State("ended", f"ended after {count(run.steps, 'step')}")
    if last is not None and _was_locked_here(run):
        return State("died", f"died after {count(run.steps, 'step')}, without a word: was it killed?")
    if age < max(_SILENT_SECONDS, _ROWS * _row_seconds(run)):
        return _alive(run, started)
    if last is None and run.environment.get("hostname") == platform.node() and reads_locks():
        return State("died", f"died after {count(run.steps, 'step')}: no process holds its folder")
    return State("silent", "no sign of life: it may have died")


def _alive(run: RunRecord, started: float) -> State:
    if time_of(run.path / METRICS) < started or run.table.step is None:
        return State("starting", "starting")
    return State("running", "running")


def _ended(run: RunRecord, end: Event) -> State:
    code = end.data.get("exit_code")
    steps = count(run.steps, "step")
    if code == 0:
        return State("ended", f"ended after {steps}")
    errors = errors_of(run)
    why = f": {one_line(errors[0].text)}" if errors else ""
    if code == ExitCode.saved:
        return State("stopped", f"stopped after {steps}{why}")
    return State("died", f"died after {steps}, exit code {code}{why}")


def errors_of(run: RunRecord) -> list[Event]:
    """What went wrong since the last start: what the launcher found to be the reason, then what each rank said."""
    events = run.events
    begin = max((n for n, event in enumerate(events) if event.kind in ("command", "restart")), default=0)
    errors = sorted((event for event in events[begin:] if event.kind == "error"), key=lambda one: "rank" in one.data)
    found: dict[str, Event] = {}
    for event in errors:
        found.setdefault(event.text, event)
    return list(found.values())


def _was_locked_here(run: RunRecord) -> bool:
    """Whether the last start locked the run's folder on this machine: a lock that is gone means a dead process."""
    command = run.last_event("command")
    data = {} if command is None else command.data
    return bool(data.get("locked")) and data.get("machine") == this_machine() and reads_locks()


def lock_holder(run_dir: Path) -> int | None:
    """The process on this machine that has locked a run's folder; None: there is none that can be seen.

    The kernel's list is read. To try the lock could keep a run from starting at that moment.
    """
    try:
        status = run_dir.stat()
        lines = _locks()
    except OSError:
        return None
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in lines:
        words = line.split()  # 1: FLOCK ADVISORY WRITE 7001 fe:00:2425071 0 EOF
        if len(words) > 5 and words[1] == "FLOCK" and words[5] == place:
            return int(words[4])
    return None


def reads_locks() -> bool:
    """Whether the kernel's list of locks can be read."""
    try:
        _locks()
    except OSError:
        return False
    return True


def _locks() -> list[str]:
    return Path("/proc/locks").read_text().splitlines()


def last_sign(run_dir: Path) -> float:
    """When the run last wrote one of its files, in seconds since 1970."""
    paths = [run_dir / name for name in (METRICS, EVENTS, STARTS, SUMMARY, PLAN)]
    return max(map(time_of, [*paths, *rank_logs(run_dir)]))


def time_of(path: Path) -> float:
    """When a file was last written; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _row_seconds(run: RunRecord) -> float:
    """The usual time between two rows of metrics.csv; 0 where it is not known."""
    every = run.plan.get("log_every_n_steps")
    seconds = run.table.last.get("train/step_seconds")
    return seconds * every if seconds is not None and isinstance(every, int) else 0.0


def duration(seconds: float) -> str:
    """A time in words: `42 s`, `3 min 20 s`, `5 h 10 min`, `2 d 3 h`."""
    whole = round(seconds)
    for size, unit, below, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def one_line(text: str, most: int = 300) -> str:
    """The first line of a message, of a traceback the last, without secrets."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and "the whole traceback is in" not in line]
    if not lines:
        return "it said nothing"
    is_traceback = any(line.startswith("Traceback") for line in lines[:2])
    line = redact_text(lines[-1] if is_traceback else lines[0]).removeprefix("shardwise: ").removeprefix("error: ")
    return line if len(line) <= most else line[: most - 1] + "…"
