"""Gives multiprocessing a folder for its sockets that the next start on the machine removes.

Python's own folder for them stays when a process is killed.
"""

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

_NAME = "shardwise-scratch-{}-"  # with the number of the process
_WHOLE = re.compile(r"shardwise-scratch-(\d+)-[a-z0-9_]{8}")


def use_scratch() -> None:
    """Use a folder of ours in this process and its forks, and remove the folders that killed processes have left."""
    remove_abandoned()
    with suppress(OSError):  # with a full /tmp, Python's own folder is used
        folder = tempfile.mkdtemp(prefix=_NAME.format(os.getpid()))
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # the lock lasts until this process and its forks are gone
        multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def remove_abandoned(patience: float = 0.0) -> None:
    """Remove the folders of processes that are gone. `patience`: seconds to wait for their forks to end as well."""
    deadline = time.monotonic() + patience
    while not all(list(map(_remove, Path(tempfile.gettempdir()).glob(_NAME.format("*") + "*")))):
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _remove(folder: Path) -> bool:
    """Remove a folder whose process is gone. Returns False if it should be tried again."""
    found = _WHOLE.fullmatch(folder.name)
    with suppress(OSError):
        if not found or folder.stat().st_uid != os.getuid() or Path(f"/proc/{found[1]}").exists():
            return True
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            # The lock fails if the process is alive in another container, where it has another number
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
    return not folder.exists()
