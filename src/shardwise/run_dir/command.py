"""Records the command that started a run, and on which machine, so that it can be given again."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.run_dir.events import append_event
from shardwise.run_dir.secrets import redact_words


def record_command(run_dir: str | Path, overrides: Sequence[str], *, launcher: str, alone: bool, locked: bool) -> None:
    """Append a "command" event. `overrides`: those of this run. `alone`: whether it is the command's only run.

    `locked`: whether this process has locked the run's folder. Secrets are left out: the file may be shown to others.
    """
    words = redact_words(["python", *sys.argv] if alone else ["python", sys.argv[0], *overrides])
    append_event(
        run_dir, "command", None, shlex.join(words), command=words, folder=os.getcwd(), launcher=launcher,
        locked=locked, machine=this_machine(), process=os.getpid(),
    )  # fmt: skip


def this_machine() -> dict[str, Any]:
    """What tells a machine, a boot of it and a container from others: their processes see each other's locks."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {"host": platform.node(), "boot": boot, "processes": os.readlink("/proc/self/ns/pid")}
    except OSError:
        return {"host": platform.node()}
