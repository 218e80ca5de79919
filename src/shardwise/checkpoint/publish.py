"""A checkpoint's folder is there whole, or not at all."""

from __future__ import annotations

import json
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

from shardwise.checkpoint.chunks import ChunkedTensor
from shardwise.checkpoint.dcp import RankError, TensorWriter, cause_of
from shardwise.checkpoint.files import sha256_of, write_through
from shardwise.checkpoint.plain import Packed, write_down
from shardwise.run_dir.checkpoints import FORMAT
from shardwise.run_dir.files import MANIFEST, unsafe_file

_T = TypeVar("_T")


class SaveError(Exception):
    """A checkpoint that could not be written; said by every rank."""


@dataclass(frozen=True)
class Snapshot:
    """A moment of a run."""

    tensors: dict[str, ChunkedTensor]
    rest: Packed  # rank 0's, which writes it for all
    own: Packed  # this rank's
    about: dict[str, Any]  # what the manifest says, for people and for tools that have no torch
    volatile: frozenset[str]  # tensors that change before the next step of an optimizer: buffers


def publish_again(path: Path, name: Path) -> None:
    """The checkpoint at `path` under another name as well, without writing it again. For one rank.

    Raises:
        OSError
    """
    partial = name.with_name(name.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(path, partial, copy_function=_link)
    _rename(partial, name)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


def _rename(partial: Path, path: Path) -> None:
    _sync(partial)
    aside = path.with_name(path.name + ".old.partial")
    if path.exists():
        os.rename(path, aside)
    os.rename(partial, path)
    _sync(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def publish(path: Path, snapshot: Snapshot, writer: TensorWriter) -> int:
    """Write `snapshot` to `path`, which is there when this returns, whole. Its size in bytes. Collective.

    Raises:
        SaveError: on every rank, what went wrong on any; what was there before is there still.
    """
    group = writer.group
    rank, partial = dist.get_rank(), path.with_name(path.name + ".partial")
    files: dict[str, Any] = {}

    def prepare() -> None:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def write_own() -> dict[str, Any]:
        written = writer.write(partial, snapshot.tensors)
        own = _save(partial / f"rank-{rank:05d}.pt", snapshot.own)
        if rank == 0:
            own += [*_save(partial / "trainer.pt", snapshot.rest), partial / ".metadata"]
        return written | {file.name: describe(file) for file in own}

    def seal() -> None:
        if rank == 0:
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
    """Every rank's result, or on every rank the error of the first that has one."""
    result: Any = None
    error = None
    try:
        result = work()
    except RankError as raised:
        error = str(raised)
    except Exception as raised:  # whatever a file system may say
        error = str(RankError(dist.get_rank(), cause_of(raised)))
    results: list[Any] = [(result, error)]
    if group is not None:
        results = [None] * dist.get_world_size()
        dist.all_gather_object(results, (result, error), group=group)
    if errors := [error for _, error in results if error is not None]:
        raise SaveError(errors[0])
    return [result for result, _ in results]


def _save(path: Path, packed: Packed) -> list[Path]:
    """The files that are written: one that anybody may read, and one for those who trust it, where it is needed."""
    with path.open("wb") as file:
        torch.save(write_down(packed), file)
        file.flush()
        os.fsync(file.fileno())
    torch.load(path, map_location="cpu", weights_only=True)  # as it will be: what cannot be read is found now
    if not packed.pickles:
        return [path]
    write_through(unsafe_file(path), pickle.dumps(packed.pickles))
    return [path, unsafe_file(path)]


def _sync(folder: Path) -> None:
    """The names in it, too, are on disk. Some file systems cannot be asked."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def describe(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
