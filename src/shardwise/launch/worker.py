"""One rank: reads the Plan that its parent resolved, and runs it. Never touches Hydra."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.plan import Plan

PR_SET_PDEATHSIG = 1


def run_rank(plan: Plan) -> int:
    """Run this process's rank. A user's mistake is one message from rank 0, without a traceback; exit code 2."""
    from shardwise.trainer import run

    try:
        run(plan)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def die_with_parent() -> None:
    """Linux: a rank whose launcher is killed, even by SIGKILL, is killed too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.environ.get("SHARDWISE_PARENT") not in (None, str(os.getppid())):
        sys.exit("shardwise: the launcher is gone")


if __name__ == "__main__":
    die_with_parent()
    sys.exit(run_rank(Plan.from_json(Path(sys.argv[1]).read_text())))
