"""Decides which checkpoints of a run stay: the last K, one every N steps for good, and the best."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import suppress
from pathlib import Path

from shardwise.checkpoint.publish import publish_again
from shardwise.plan import Plan
from shardwise.run_dir.checkpoints import best_in, damage, list_checkpoints, step_of
from shardwise.run_dir.events import append_event
from shardwise.run_dir.files import (
    BEST,
    BEST_CHECKPOINTS,
    CHECKPOINTS,
    PARTIAL,
    best_checkpoint_path,
    checkpoint_path,
    partial_path,
    put_aside,
    sync,
    write_whole,
)
from shardwise.run_dir.reading import read_json


def remove_superseded(plan: Plan, step: int, *, but: Path | None = None) -> None:
    """Remove the checkpoints, `but` one, that are not needed any more after the save of `step`.

    Checkpoints of later steps go too. A run that was rolled back has them, and `resume=auto` would go on from them.
    """
    every = plan.checkpoint.keep_every_n_steps
    for path in list_checkpoints(plan.run_dir):
        if step_of(path) > step:
            remove(path)
    whole = [path for path in list_checkpoints(plan.run_dir) if damage(path) is None]
    for old in whole[: -plan.checkpoint.keep_last]:
        if old != but and (every is None or step_of(old) % every):
            remove(old)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder, whose name goes first: a kill leaves no checkpoint with half of its files.

    What cannot be removed is said: the end of the run, and its next start, try again.
    """
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return
        if not path.name.endswith(PARTIAL):
            named, path = path, partial_path(path.with_name(path.name + ".removed"))
            shutil.rmtree(path, ignore_errors=True)
            named.rename(path)
            sync(path.parent)  # else a loss of power may keep the name and lose files
        shutil.rmtree(path)
    except OSError as error:
        print(f"{path} could not be removed: {error.strerror}; the run goes on", flush=True)


def remove_left_over(folder: Path) -> None:
    """Remove from the folder of checkpoints what a process was killed over: unfinished folders, and bests of before."""
    for left in folder.glob(f"*{PARTIAL}"):
        if left.name.startswith(("step-", "best")):  # another's file is left alone
            remove(left)
    with suppress(OSError, ValueError, LookupError, TypeError):  # no best.json, or one that does not say the best
        if (best := best_in(folder, read_json(folder / BEST))).exists():
            remove_other_bests(best)


def remove_other_bests(best: Path) -> None:
    for other in best.parent.glob(BEST_CHECKPOINTS):
        if other != best:
            remove(other)


def write_best(path: Path, monitor: str, score: float) -> None:
    """Write the best score and the name of its checkpoint to `best.json` in the same folder."""
    best = {"checkpoint": path.name, "monitor": monitor, "score": score}
    write_whole(path.parent / BEST, json.dumps(best) + "\n")


def is_better(plan: Plan, score: float, than: float | None) -> bool:
    sign = -1 if plan.checkpoint.mode == "max" else 1
    return not math.isnan(score) and (than is None or sign * score < sign * than)


def note_best(plan: Plan, path: Path, score: float) -> None:
    """Name the checkpoint at `path`, which is published, as the best one, and remove those before. Raises OSError."""
    monitor = str(plan.checkpoint.monitor)
    write_best(path, monitor, score)
    append_event(plan.run_dir, "best", step_of(path), f"{monitor} is at its best, {score:.6g}", score=score)
    remove_other_bests(path)


def catch_up_on_best(plan: Plan, step: int, score: float) -> None:
    """Publish the checkpoint of `step` as the best one if its score is, and a process was killed between the two."""
    best, _ = read_best(Path(plan.run_dir) / CHECKPOINTS, plan.checkpoint.monitor, keeps=True)
    if not is_better(plan, score, best):
        return
    path = best_checkpoint_path(plan.run_dir, step)
    try:
        publish_again(checkpoint_path(plan.run_dir, step), path)
        note_best(plan, path, score)
    except OSError as error:
        print(f"the best checkpoint {path} could not be written: {error}", flush=True)


def read_best(folder: Path, monitor: str | None, *, keeps: bool = False) -> tuple[float | None, str | None]:
    """Score and path of the best checkpoint in `folder`, or (None, None) where there is none by this metric.

    `keeps`: put a file that says neither aside, and say so; a better score would write over it.
    """
    try:
        best = read_json(folder / BEST)
        path, score, is_by_it = best_in(folder, best), float(best["score"]), best["monitor"] == monitor
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, LookupError, TypeError) as error:
        if keeps:
            _keep_damaged(folder / BEST, error)
        return None, None
    return (score, str(path)) if is_by_it and path.exists() else (None, None)


def _keep_damaged(path: Path, error: Exception) -> None:
    kept = put_aside(path)
    print(
        f"{path} does not say which checkpoint is the best ({type(error).__name__}): it is kept as {kept.name}, a "
        f"best-….ckpt of before stays, and the best is looked for from here on",
        flush=True,
    )
