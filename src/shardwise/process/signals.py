"""Signals ask a run to save or to leave. A handler only records that; the ranks agree on it at the end of a step.

callbacks/signals.py obeys.
"""

from __future__ import annotations

import ctypes
import multiprocessing.util  # whose own exit function, which waits, is thereby registered before ours
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

LEAVE = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)  # these mean: save and leave
ENDS = (signal.SIGTERM, signal.SIGHUP)  # a tool ends at these, as at Ctrl-C
SAVE = signal.SIGUSR1  # this means: save and go on
_SAVES = 2**20  # a request to save counts as this many in a sum over ranks: more than there are ranks
_PROFILES = 2**40  # and a request for a profile, which rank 0 alone makes, as this many times its number
# A second Ctrl-C counts only after this time: who signals every process of a group may reach one process twice
_TWICE_SECONDS = 0.5
_launched = "SHARDWISE_PARENT" in os.environ  # our launcher ends its ranks by itself at the second Ctrl-C


class SignalRequests:
    """The requests that signals have made of this process and that are not fulfilled yet."""

    leave: signal.Signals | None = None
    since = 0.0
    save = False
    profile = 0  # which profile `shardwise profile` has asked for, below 2**12; 0: none

    def take_as_number(self) -> int:
        """Return the requests as a number that may be summed over ranks, and forget those to save and to profile."""
        number = int(self.leave is not None)
        if self.save:
            self.save = False
            number += _SAVES
        profile, self.profile = self.profile, 0
        return number + profile * _PROFILES

    def ask_for_profile(self, number: int) -> None:
        """Ask all ranks for the profile of this number, from 1 to 2**12 - 1. Rank 0 alone may call this."""
        self.profile = number


def to_leave(total: float) -> bool:
    """Tell whether the sum over ranks holds a request to leave."""
    return total % _SAVES > 0


def to_save(total: float) -> bool:
    """Tell whether the sum over ranks holds a request to save."""
    return total % _PROFILES >= _SAVES


def to_profile(total: float) -> int:
    """The number of the profile that the sum over ranks asks for; 0: of none."""
    return int(total // _PROFILES)


signal_requests = SignalRequests()
_process = os.getpid()  # the rank's process: data workers are its forks, and have other numbers


def install_handlers() -> None:
    """Record signals from here on: training has begun, and there is something to save.

    Before that, a signal's default action ends the process, and a run that is started again has lost nothing.
    """
    for number in LEAVE:
        _unless_ignored(number, _record_request)
    signal.signal(SAVE, _record_request)


def ignore_save_signal() -> None:
    """Ignore `SAVE` before training: there is nothing to save, and the signal would end the process."""
    signal.signal(SAVE, signal.SIG_IGN)


def leave_to_parent() -> None:
    """Ignore, in a data worker, a signal to the whole process group: its rank obeys, and needs the worker's data."""
    for number in (*LEAVE, SAVE):  # not by SIG_IGN, which programs that the worker starts would inherit
        signal.signal(number, lambda number, frame: None)


def leave_at_once_on_ctrl_c() -> None:
    """End at Ctrl-C without a traceback, until `install_handlers`: for a rank in the terminal's own process."""
    _unless_ignored(signal.SIGINT, _interrupted)


class Stopped(KeyboardInterrupt):
    """A signal other than Ctrl-C's ends this process, in the way that Ctrl-C would. Its first argument is a message."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def ends_as_at_ctrl_c() -> Iterator[None]:
    """Raise `Stopped` at the first SIGTERM or SIGHUP, for a tool that says at its end what is kept."""
    before = {number: signal.getsignal(number) for number in ENDS}
    for number in ENDS:
        _unless_ignored(number, _stop)
    try:
        yield
    except Stopped:
        before = {}  # a second signal does not end it before it has said so
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    for every in ENDS:  # `timeout`, for one, sends its signal twice
        _unless_ignored(every, lambda number, frame: None)
    raise Stopped(number)


def _unless_ignored(number: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> None:
    if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP, a shell's background job SIGINT
        signal.signal(number, handler)


def _record_request(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _process:
        return
    if number == SAVE:
        signal_requests.save = True
    elif signal_requests.leave is None:
        signal_requests.leave, signal_requests.since = signal.Signals(number), time.monotonic()
    elif (
        number == signal.SIGINT == signal_requests.leave and not _launched and _seconds_since_request() > _TWICE_SECONDS
    ):
        _interrupted(number, frame)


def _seconds_since_request() -> float:
    return time.monotonic() - signal_requests.since


def _interrupted(number: int, frame: FrameType | None) -> None:
    # KeyboardInterrupt would not do: Lightning turns it into exit code 1. The rank ends its data workers at once: one
    # that notices by itself may print a traceback, and torch raises in this process when a worker is gone.
    if os.getpid() == _process:
        end_workers()
        sys.stderr.write("shardwise: stopped by Ctrl-C\n")
        raise SystemExit(128 + number)


def end_workers() -> None:
    """Kill the data workers, which ignore SIGTERM: an interpreter that ends would wait for them for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises in this process when one is gone
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def in_words(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


# Ends a process together with its parent, even if the parent is killed by SIGKILL.

PARENT = "SHARDWISE_PARENT"
BEHIND_ANOTHER = "behind a profiler"  # in PARENT: a program that our launcher has started is between the two
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Kill this rank when its launcher ends; end at once if that is gone already."""
    kill_with_parent()
    if os.environ.get(PARENT) not in (None, BEHIND_ANOTHER, str(os.getppid())):
        sys.exit("shardwise: the launcher is gone")


def kill_with_parent() -> None:
    """On Linux, have the kernel send this process SIGKILL when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
