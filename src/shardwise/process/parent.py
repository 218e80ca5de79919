"""Ends a process together with its parent, even if the parent is killed by SIGKILL."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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
