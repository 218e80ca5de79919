"""Publishes a checkpoint: its folder gets its name when everything in it is written, or not at all."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.checkpoint.chunks import ChunkedTensor
from shardwise.checkpoint.dcp import RankError, TensorWriter, cause_of
from shardwise.checkpoint.files import sha256_of, write_through
from shardwise.checkpoint.plain import Packed, write_down
from shardwise.run_dir.checkpoints import FORMAT, aside_path, run_of
from shardwise.run_dir.files import (
    EVENTS,
    MANIFEST,
    METRICS,
    PLAN,
    RANKS,
    TENSORS,
    TRAINER_STATE,
    partial_path,
    rank_state,
    sync,
    tokenizer_folder,
    unsafe_file,
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
