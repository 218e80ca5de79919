"""Which checkpoints of a run stay: the last K, every so many for good, and the best."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from shardwise.plan import Plan
from shardwise.run_dir.checkpoints import damage, list_checkpoints, step_of


def remove_superseded(plan: Plan, step: int) -> None:
    """Behind the save of `step`. Later ones go too, of a run that has been taken back: `resume=auto` would go on from
    them."""
    kept = plan.checkpoint.keep_every_n_steps
    for path in list_checkpoints(plan.run_dir):
        if step_of(path) > step:
            remove(path)
    whole = [path for path in list_checkpoints(plan.run_dir) if damage(path) is None]
    for old in whole[: -plan.checkpoint.keep_last]:
        if kept is None or step_of(old) % kept:
            remove(old)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def write_best(path: Path, monitor: str, score: float) -> None:
    """The best score stands in `best.json`, beside its checkpoint."""
    beside = path.parent / "best.json.partial"
    beside.write_text(json.dumps({"checkpoint": path.name, "monitor": monitor, "score": score}) + "\n")
    beside.replace(path.parent / "best.json")


def read_best(folder: Path, monitor: str | None) -> tuple[float | None, str | None]:
    """Score and path of the best checkpoint in a run's `checkpoints/`; (None, None): none by this metric is there."""
    try:
        best = json.loads((folder / "best.json").read_text())
    except (OSError, ValueError):
        return None, None
    path = folder / best["checkpoint"]
    if best["monitor"] != monitor or not path.exists():
        return None, None
    return best["score"], str(path)
