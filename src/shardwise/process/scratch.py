"""Where multiprocessing puts its sockets. Python's own folder for them outlives a process that is killed; these do not
outlive the next start on the machine."""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_NAME = "shardwise-scratch-{}-"  # of the process
_WHOLE = re.compile(r"shardwise-scratch-(\d+)-[a-z0-9_]{8}")


def use_scratch() -> None:
    """From here on, for this process and its forks. What killed ones have left is removed."""
    remove_abandoned()
    with suppress(OSError):  # a full /tmp: as Python would have done
        folder = tempfile.mkdtemp(prefix=_NAME.format(os.getpid()))
        held = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(held, fcntl.LOCK_SH)  # until this process, and its forks, are gone
        multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def remove_abandoned(patience: float = 0.0) -> None:
    """Of processes that are gone. `patience`: seconds in which their forks will be, too."""
    deadline = time.monotonic() + patience
    while not all(list(map(_remove, Path(tempfile.gettempdir()).glob(_NAME.format("*") + "*")))):
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _remove(folder: Path) -> bool:
    """Whether nothing is to be done about it any more."""
    found = _WHOLE.fullmatch(folder.name)
    with suppress(OSError):
        if not found or folder.stat().st_uid != os.getuid() or Path(f"/proc/{found[1]}").exists():
            return True
        held = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nor is it alive in another container
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(held)
    return not folder.exists()
