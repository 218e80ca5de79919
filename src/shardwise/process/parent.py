"""A process that ends with its parent, even where that is killed by SIGKILL."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT = "SHARDWISE_PARENT"
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """A rank whose launcher is killed, even by SIGKILL, is killed too."""
    kill_with_parent()
    if os.environ.get(PARENT) not in (None, str(os.getppid())):
        sys.exit("shardwise: the launcher is gone")


def kill_with_parent() -> None:
    """Linux: this process gets SIGKILL when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
