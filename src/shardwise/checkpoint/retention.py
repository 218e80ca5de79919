"""Decides which checkpoints of a run stay: the last K, one every N steps for good, and the best."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from shardwise.plan import Plan
from shardwise.run_dir.checkpoints import damage, list_checkpoints, step_of
from shardwise.run_dir.files import BEST, write_whole


def remove_superseded(plan: Plan, step: int) -> None:
    """Remove the checkpoints that are not needed any more after the save of `step`.

    Checkpoints of later steps go too. A run that was rolled back has them, and `resume=auto` would go on from them.
    """
    every = plan.checkpoint.keep_every_n_steps
    for path in list_checkpoints(plan.run_dir):
        if step_of(path) > step:
            remove(path)
    whole = [path for path in list_checkpoints(plan.run_dir) if damage(path) is None]
    for old in whole[: -plan.checkpoint.keep_last]:
        if every is None or step_of(old) % every:
            remove(old)


def remove(path: Path) -> None:
    """Remove a folder or a file."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def write_best(path: Path, monitor: str, score: float) -> None:
    """Write the best score and the name of its checkpoint to `best.json` in the same folder."""
    best = {"checkpoint": path.name, "monitor": monitor, "score": score}
    write_whole(path.parent / BEST, json.dumps(best) + "\n")


def read_best(folder: Path, monitor: str | None) -> tuple[float | None, str | None]:
    """Score and path of the best checkpoint in `folder`, or (None, None) where there is none by this metric."""
    try:
        best = json.loads((folder / BEST).read_text())
    except (OSError, ValueError):
        return None, None
    path = folder / best["checkpoint"]
    if best["monitor"] != monitor or not path.exists():
        return None, None
    return best["score"], str(path)
