"""The names of a run's files, and how they are written."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.run_dir.job_folder import has_begun

MANIFEST = "manifest.json"  # the last file to be written: a folder without it is no checkpoint


def checkpoint_path(run_dir: str | Path, step: int) -> Path:
    return Path(run_dir) / "checkpoints" / f"step-{step:08d}.ckpt"


def unsafe_file(path: Path) -> Path:
    """Beside a file of a checkpoint: what only a pickle can hold, for those who trust whoever wrote it."""
    return path.with_suffix(".unsafe.pkl")


def stage_file(name: str, stage: str) -> str:
    """`plan.json` → `plan-validate.json`: looking at a run leaves the record of how it was trained."""
    return name if stage == "fit" else f"-{stage}.".join(name.rsplit(".", 1))


def keep_earlier(path: Path, text: str) -> Path | None:
    """What a run was started with stays beside what it goes on with: `plan.json` → `plan-1.json`, the oldest first.

    Returns:
        Where it is now, if it had to go.
    """
    if "-" in path.stem or not path.exists() or path.read_text() in ("", text):
        return None
    number = 1
    while (kept := path.with_stem(f"{path.stem}-{number}")).exists():
        number += 1
    path.rename(kept)
    return kept


def trained_mark(run_dir: str | Path) -> Path:
    """A file that is there as soon as the first step has been made."""
    return Path(run_dir) / "logs" / "trained"


_held: list[int] = []
_LOCK_SECONDS = 120


def hold(run_dir: Path, stage: str) -> bool:
    """A run's folder has one writer, for as long as this process lives. False: a file system that cannot tell."""
    if stage != "fit":
        return False
    held = os.open(run_dir, os.O_RDONLY)
    # A requeued job may begin while its last process dies on another node, or a server still keeps that one's lock
    deadline = time.monotonic() + (_LOCK_SECONDS if has_begun(str(run_dir)) else 0)
    while True:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(held)
                raise ConfigError(
                    f"{run_dir} is being written by a run that is still alive: stop it, or give another name="
                ) from None
            time.sleep(0.5)
        except OSError:
            os.close(held)
            return False
    _held.append(held)
    return True


def rank_log(run_dir: str | Path, rank: int) -> Path:
    return Path(run_dir) / "logs" / f"rank-{rank:05d}.log"
