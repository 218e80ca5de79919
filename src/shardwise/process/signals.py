"""What a run is asked for from outside. A handler only notes it; the ranks agree on it at the end of a step, see
callbacks/leaving.py."""

from __future__ import annotations

import multiprocessing.util  # whose own exit function, which waits, is thereby registered before ours
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

LEAVE = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)  # save and leave
SAVE = signal.SIGUSR1  # save and go on
_SAVES = 2**20  # more than there are ranks
_TWICE_SECONDS = 0.5  # between two Ctrl-C: who signals every process of a group may reach one twice
_launched = "SHARDWISE_PARENT" in os.environ  # by our launcher, whose second Ctrl-C ends its ranks by itself


class Asked:
    """What this process has been asked for and has not done yet."""

    leave: signal.Signals | None = None
    since = 0.0
    save = False

    def take(self) -> int:
        """As a number that may be summed over ranks."""
        number = int(self.leave is not None)
        if self.save:
            self.save = False
            number += _SAVES
        return number


def to_leave(total: float) -> bool:
    return total % _SAVES > 0


def to_save(total: float) -> bool:
    return total >= _SAVES


asked = Asked()
_process = os.getpid()  # of the rank: its data workers are forks


def listen() -> None:
    """From here on a signal is noted: training has begun, there is something to save.

    Before, its default action ends the process, and a run that is started again has lost nothing.
    """
    for number in LEAVE:
        _unless_ignored(number, _note)
    signal.signal(SAVE, _note)


def overlook() -> None:
    """Before training `SAVE` finds nothing to save, and would end the process."""
    signal.signal(SAVE, signal.SIG_IGN)


def leave_to_parent() -> None:
    """For a data worker: a signal to a whole process group, Slurm's say, is its rank's to obey, and needs its data."""
    for number in (*LEAVE, SAVE):  # not SIG_IGN, which programs that it starts would inherit
        signal.signal(number, lambda number, frame: None)


def leave_at_once_on_ctrl_c() -> None:
    """For a rank in the terminal's own process, until `listen`."""
    _unless_ignored(signal.SIGINT, _interrupted)


def _unless_ignored(number: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> None:
    if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a shell's background job
        signal.signal(number, handler)


def _note(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _process:
        return
    if number == SAVE:
        asked.save = True
    elif number == signal.SIGINT == asked.leave and not _launched and time.monotonic() - asked.since > _TWICE_SECONDS:
        _interrupted(number, frame)
    elif asked.leave is None:
        asked.leave, asked.since = signal.Signals(number), time.monotonic()


def _interrupted(number: int, frame: FrameType | None) -> None:
    # Not KeyboardInterrupt, which Lightning turns into exit code 1. Data workers are their rank's to end, at once:
    # one that is left to notice may print a traceback, and torch raises in this process when one is gone.
    if os.getpid() == _process:
        end_workers()
        sys.stderr.write("shardwise: stopped by Ctrl-C\n")
        raise SystemExit(128 + number)


def end_workers() -> None:
    """Data workers, which take no notice of SIGTERM: an interpreter that ends would wait for them for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises in this process when one is gone
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def in_words(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
