"""Where multiprocessing puts its sockets. Python's own folder for them outlives a process that is killed; these do not
outlive the next start on the machine."""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_NAME = "shardwise-{}-"  # of the process


def use_scratch() -> None:
    """From here on, for this process and its forks. What killed ones have left is removed."""
    remove_abandoned()
    with suppress(OSError):  # a full /tmp: as Python would have done
        folder = tempfile.mkdtemp(prefix=_NAME.format(os.getpid()))
        held = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(held, fcntl.LOCK_SH)  # until this process, and its forks, are gone
        multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def remove_abandoned(process: int | None = None) -> None:
    """Of dead processes; of one, whose launcher knows that it is dead."""
    pattern = _NAME.format("[0-9]*" if process is None else process) + "*"
    for folder in Path(tempfile.gettempdir()).glob(pattern):
        with suppress(OSError):
            owner = int(folder.name.split("-")[1])
            if folder.stat().st_uid != os.getuid() or (process is None and Path(f"/proc/{owner}").exists()):
                continue
            held = os.open(folder, os.O_RDONLY)
            try:
                if process is None:  # nor is it alive in another container
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)
