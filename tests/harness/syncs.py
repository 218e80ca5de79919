"""Sees that what gets its final name in a folder, or lets something older be removed, is on the disk by then."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from shardwise.run_dir.files import EVENTS, METRICS, RANKS


class Syncs:
    """Follows what this process writes below `root`: what is not synced when a folder or a file gets its name."""

    def __init__(self, root: Path) -> None:
        self.root = f"{root.resolve()}/"
        self.unsynced: set[str] = set()  # files with bytes, and folders with names, that a loss of power may take
        self.found: list[str] = []
        self.names: list[str] = []  # of what was published
        self._sync = os.fsync
        os.fsync = self._synced
        sys.addaudithook(self._see)

    def _synced(self, descriptor: int) -> None:
        self._sync(descriptor)
        self.unsynced.discard(os.readlink(f"/proc/self/fd/{descriptor}"))

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in {"open", "os.mkdir", "os.link", "os.rename", "shutil.rmtree"}:
            return
        path = str(arguments[0]) if isinstance(arguments[0], (str, os.PathLike)) else ""
        if not os.path.abspath(path).startswith(self.root):
            return
        path = os.path.abspath(path)
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            self.unsynced |= {path} if os.path.exists(path) else {path, os.path.dirname(path)}
        elif event == "os.mkdir":
            self.unsynced |= {path, os.path.dirname(path)}
        elif event == "os.link":
            self.unsynced.add(os.path.dirname(os.path.abspath(arguments[1])))
        elif event == "os.rename":
            target = os.path.abspath(arguments[1])
            if not target.endswith(".partial"):
                self.names.append(os.path.basename(target))
                inner = [one for one in self.unsynced if one == path or one.startswith(f"{path}/")]
                if self.names[-1].startswith("step-"):
                    inner += [one for one in self.unsynced if one.endswith((METRICS, RANKS, EVENTS))]
                self.found += [f"{one.removeprefix(self.root)} is not synced: {self.names[-1]}" for one in inner]
            self.unsynced |= {os.path.dirname(path), os.path.dirname(target)}
        elif event == "shutil.rmtree" and not path.endswith("checkpoints") and os.path.dirname(path) in self.unsynced:
            self.found.append(f"{os.path.basename(path)} is removed before the names beside it are synced")
