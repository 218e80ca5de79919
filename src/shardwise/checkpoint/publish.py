"""Publishes a checkpoint: its folder gets its name when everything in it is written, or not at all."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.checkpoint.dcp import ChunkedTensor, RankError, TensorWriter, cause_of
from shardwise.checkpoint.files import sha256_of, write_through
from shardwise.checkpoint.plain import Packed, write_down
from shardwise.plan import Plan
from shardwise.run_dir.checkpoints import FORMAT, aside_path, best_in, damage, list_checkpoints, run_of, step_of
from shardwise.run_dir.events import append_event
from shardwise.run_dir.files import (
    BEST,
    BEST_CHECKPOINTS,
    CHECKPOINTS,
    EVENTS,
    MANIFEST,
    METRICS,
    PARTIAL,
    PLAN,
    RANKS,
    TENSORS,
    TRAINER_STATE,
    best_checkpoint_path,
    checkpoint_path,
    partial_path,
    put_aside,
    rank_state,
    read_json,
    sync,
    tokenizer_folder,
    unsafe_file,
    write_whole,
)

_T = TypeVar("_T")


class SaveError(Exception):
    """A checkpoint could not be written. Every rank raises it."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one moment."""

    tensors: dict[str, ChunkedTensor]
    rest: Packed  # what is the same on all ranks: rank 0 packs and writes it, and it is empty elsewhere
    own: Packed  # what is this rank's alone
    about: dict[str, Any]  # facts in the manifest, for people and for tools that have no torch
    volatile: frozenset[str]  # names of tensors, such as buffers, that may change before an optimizer steps again


def publish_again(path: Path, name: Path) -> None:
    """Give the checkpoint at `path` a second name by links to its files. One rank calls this.

    Raises:
        OSError: the links could not be made.
    """
    partial = partial_path(name)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(path, partial, copy_function=_link)
    except shutil.Error as errors:
        raise OSError(errors.args[0][0][-1]) from None  # of the first file that failed
    _rename(partial, name)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # some file systems have no links
        shutil.copy2(source, target)
        sync(Path(target))


def _rename(partial: Path, path: Path) -> None:
    for folder in (partial, *(inner for inner in partial.rglob("*") if inner.is_dir())):
        sync(folder)
    aside = aside_path(path)
    if os.path.lexists(path):  # a link that leads nowhere, too
        _clear(aside)  # of a save that failed when it had its name
        os.rename(path, aside)
    os.rename(partial, path)
    sync(path.parent)
    _clear(aside)


def _clear(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def publish(path: Path, snapshot: Snapshot, writer: TensorWriter) -> int:
    """Write `snapshot` to `path`, which is complete when this returns. Collective.

    Returns:
        The size in bytes, of all ranks.

    Raises:
        SaveError: a rank could not write. Every rank raises it, and a checkpoint that was at `path` before stays.
    """
    group = writer.group
    rank, partial = dist.get_rank(), partial_path(path)
    files: dict[str, Any] = {}

    def prepare() -> None:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def write_own() -> dict[str, Any]:
        written = writer.write(partial, snapshot.tensors)
        own = _save(rank_state(partial, rank), snapshot.own)
        if rank == 0:
            own += [*_save(partial / TRAINER_STATE, snapshot.rest), partial / TENSORS, *_copy_identity(path, partial)]
        return written | {file.relative_to(partial).as_posix(): describe(file) for file in own}

    def seal() -> None:
        if rank == 0:
            for rows in (METRICS, RANKS, EVENTS):  # a checkpoint that outlives a loss of power has its rows beside it
                if (run_of(path) / rows).exists():
                    sync(run_of(path) / rows)
            manifest = {"format": FORMAT, **snapshot.about, "ranks": dist.get_world_size(), "files": files}
            write_through(partial / MANIFEST, json.dumps(manifest, indent=1).encode())
            _rename(partial, path)

    try:
        run_on_every_rank(prepare, group)
        for own in run_on_every_rank(write_own, group):
            files |= own
        run_on_every_rank(seal, group)
    except SaveError:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return sum(int(file["bytes"]) for file in files.values())


def run_on_every_rank(work: Callable[[], _T], group: dist.ProcessGroup | None) -> list[_T]:
    """Run `work` on every rank and return all ranks' results. Collective.

    Raises:
        SaveError: `work` has failed on a rank. Every rank raises the error of the first such rank.
    """
    result: Any = None
    error = None
    try:
        result = work()
    except RankError as raised:
        error = str(raised)
    except Exception as raised:  # file systems, and torch around them, raise many kinds of errors
        error = str(RankError(dist.get_rank(), cause_of(raised)))
    results: list[Any] = [(result, error)]
    if group is not None:
        results = [None] * dist.get_world_size()
        dist.all_gather_object(results, (result, error), group=group)
    if errors := [error for _, error in results if error is not None]:
        raise SaveError(errors[0])
    return [result for result, _ in results]


def _save(path: Path, packed: Packed) -> list[Path]:
    """Write `packed` and return the files: one of plain data and, where there are pickles, one for these."""
    with path.open("wb") as file:
        torch.save(write_down(packed), file)
        file.flush()
        os.fsync(file.fileno())
    # Load the file as a resumed run will: a value that cannot be read is found now
    torch.load(path, map_location="cpu", weights_only=True)
    if not packed.pickles:
        return [path]
    write_through(unsafe_file(path), pickle.dumps(packed.pickles))
    return [path, unsafe_file(path)]


def _copy_identity(path: Path, partial: Path) -> list[Path]:
    """Copy the run's Plan and its tokenizer's files, so that a checkpoint that is copied elsewhere can still be used.

    They are copies, since a link would change with the run's file. A tokenizer has less than 100 bytes for each token,
    and the weights of a token, with what the optimizer keeps of them, many times that.
    """
    run = run_of(path)
    sources = [run / PLAN, *sorted(tokenizer_folder(run).glob("*"))]
    copies = [partial / source.relative_to(run) for source in sources if source.is_file()]
    for copy in copies:
        copy.parent.mkdir(exist_ok=True)
        write_through(copy, (run / copy.relative_to(partial)).read_bytes())
    return copies


def describe(file: Path) -> dict[str, Any]:
    """What the manifest says of a file."""
    return {"bytes": file.stat().st_size, "sha256": sha256_of(file)}


# Decides which checkpoints of a run stay: the last K, one every N steps for good, and the best.


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
