"""Writing a checkpoint so that it is there whole or not at all, beside the training or in its way.

Every rank writes into `<name>.partial`, its boxes through DCP and a file of its own; sizes and checksums of all files
go into manifest.json, the last to be written; then the folder gets its name. What has no manifest is no checkpoint.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import CudaError, check_error, cudart

from shardwise.checkpoint.find import FORMAT, MANIFEST, unsafe_file
from shardwise.checkpoint.plain import Packed, write_down
from shardwise.checkpoint.tensors import (
    Box,
    Pace,
    RankError,
    Spread,
    TensorWriter,
    cause_of,
    sha256_of,
    write_through,
)

_T = TypeVar("_T")
_SPARE = 0.05  # of a device's memory: stays free where a save takes some of it
_PIECE = 2**25  # bytes
_SLAB = 2**26  # bytes


class SaveError(Exception):
    """A checkpoint that could not be written; said by every rank."""


@dataclass(frozen=True)
class Snapshot:
    """A moment of a run."""

    tensors: dict[str, Spread]
    rest: Packed  # rank 0's, which writes it for all
    own: Packed  # this rank's
    about: dict[str, Any]  # what the manifest says, for people and for tools that have no torch
    volatile: frozenset[str]  # tensors that change before the next step of an optimizer: buffers


@dataclass
class Outcome:
    path: Path
    seconds: float = 0.0  # of writing
    bytes: int = 0  # of all ranks
    error: str | None = None


class _Pinned:
    """Pinned memory of the host.

    Not torch's, for which the driver makes the pages while it holds its lock: the training could launch nothing in the
    meantime, 15 s for 24 GB. Here they are made first. (torch would, too, if asked to for the whole process,
    `pinned_use_cuda_host_register`; and makes 2 GB of 1.1.)
    """

    def __init__(self) -> None:
        self._slabs: list[tuple[mmap.mmap, int]] = []  # and where
        self._shared, self._used = mmap.mmap(-1, 1), 1  # by small tensors, and how much of it

    def like(self, values: Tensor) -> Tensor:
        """Uninitialized. Its storage is its own, as DCP wants it."""
        bytes_ = values.nbytes
        if not bytes_:
            return torch.empty(values.shape, dtype=values.dtype)
        if bytes_ > _SLAB // 8:
            slab, begin = self._slab(bytes_), 0
        else:
            if self._used + bytes_ > len(self._shared):
                self._shared, self._used = self._slab(_SLAB), 0
            slab, begin = self._shared, self._used
            self._used += (bytes_ + 63) // 64 * 64
        return torch.frombuffer(slab, dtype=values.dtype, count=values.numel(), offset=begin).view(values.shape)

    def _slab(self, bytes_: int) -> mmap.mmap:
        try:
            slab = mmap.mmap(-1, bytes_, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            slab.madvise(mmap.MADV_DONTFORK)  # the parent's pages could become the child's, and copies go there
            with suppress(OSError):  # a kernel without
                slab.madvise(mmap.MADV_HUGEPAGE)
            address = torch.frombuffer(slab, dtype=torch.uint8).zero_().data_ptr()
            check_error(int(cudart().cudaHostRegister(address, bytes_, 0)))  # type: ignore[no-untyped-call]
        except (OSError, CudaError) as error:
            raise MemoryError(
                f"Tried to allocate {bytes_ / 2**20:.0f} MiB of the host's memory, pinned, for a checkpoint: {error}"
            ) from None
        self._slabs.append((slab, address))
        return slab

    def close(self) -> None:
        while self._slabs:
            cudart().cudaHostUnregister(self._slabs.pop()[1])  # type: ignore[no-untyped-call]
        self._shared, self._used = mmap.mmap(-1, 1), 1


@dataclass
class Writer:
    """Saves, one at a time. Its group is its own: a save in a thread does not meet the training's collectives."""

    asynchronous: bool
    device: torch.device
    timeout: timedelta  # for a rank to write its part
    outcome: Outcome | None = None  # of the last save that has ended
    _pending: Future[Outcome] | None = None
    _staged: dict[tuple[str, tuple[int, ...]], Tensor] = field(default_factory=dict)  # memory of the host, reused
    _pinned: _Pinned = field(default_factory=_Pinned)
    _kept: tuple[int, int, int] | None = None  # when the copying stream got its memory; see _aside

    def __post_init__(self) -> None:
        group = dist.new_group(backend="gloo", timeout=self.timeout) if dist.get_world_size() > 1 else None
        self._writer = TensorWriter(group)
        self._thread = ThreadPoolExecutor(1, "checkpoint") if self.asynchronous else None
        self._copies: torch.cuda.Stream | None = None
        if self._thread is not None and self.device.type == "cuda":
            self._thread.submit(torch.cuda.set_device, self.device)  # else it would open a context on the first GPU
            self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @property
    def busy(self) -> bool:
        return self._pending is not None and not self._pending.done()

    @property
    def ended(self) -> Outcome | None:
        """What `wait` would return, if it need not wait for it."""
        pending = self._pending
        return pending.result() if pending is not None and pending.done() and not pending.exception() else None

    def save(self, path: Path, snapshot: Snapshot, then: Callable[[], None]) -> torch.cuda.Event | None:
        """Write `snapshot`; on rank 0, `then` when it is published. Collective; waits for the save before.

        Returns:
            What the next change of weights or optimizer state has to wait for. Everything else is copied already.
        """
        self.wait()
        self._writer.pace = Pace(beside_training=self.asynchronous)
        if self._thread is None:
            self.outcome = _write(path, snapshot, self._writer, then, None)
            return None
        bring, copied = self._stage(snapshot)
        self._pending = self._thread.submit(_write, path, replace(snapshot, tensors={}), self._writer, then, bring)
        return copied

    def also(self, path: Path, work: Callable[[], None]) -> None:
        """On rank 0, when the save that is under way, or was the last, is published. Nothing if it failed."""
        if self._thread is not None and self._pending is not None:
            self._pending = self._thread.submit(_afterwards, self._pending.result, path, work, self._writer.group)
        elif self.outcome is not None:
            last = self.outcome
            self.outcome = _afterwards(lambda: last, path, work, self._writer.group)

    def wait(self) -> Outcome | None:
        """Until nothing is being written. The last outcome, the same on all ranks."""
        if self._pending is not None:
            self._writer.pace.hurry()
            pending, self._pending = self._pending, None
            self.outcome = pending.result()
        return self.outcome

    def close(self) -> None:
        """Ends the thread and the group, once nothing is being written."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            if self._writer.group is not None:
                dist.destroy_process_group(self._writer.group)
                self._writer.group = None
            self._staged.clear()
            self._pinned.close()

    def _stage(self, snapshot: Snapshot) -> tuple[Callable[[], dict[str, Spread]], torch.cuda.Event | None]:
        """What gives the copies in the host's memory, for the thread to call, and what `save` returns."""
        if self._copies is None:
            staged = _each(snapshot.tensors, self._stage_one)
            return lambda: staged, None
        computing = torch.cuda.current_stream(self.device)
        self._copies.wait_stream(computing)
        with torch.cuda.stream(self._copies):
            aside = self._aside(snapshot.tensors)
            if aside is not None:
                computing.wait_stream(self._copies)
                return partial(self._bring, aside, self._copies), None
            volatile = {name: spread for name, spread in snapshot.tensors.items() if name in snapshot.volatile}
            staged = _each(volatile, self._stage_one)
            computing.wait_stream(self._copies)
            staged |= _each({n: s for n, s in snapshot.tensors.items() if n not in volatile}, self._stage_one)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._copies)

        def arrived() -> dict[str, Spread]:
            copied.synchronize()
            return staged

        return arrived, copied

    def _aside(self, tensors: dict[str, Spread]) -> dict[str, Spread] | None:
        """Copies on the device, if there is room: made in milliseconds, and the training waits for these alone.

        Their memory is the copying stream's from then on, until the allocator runs out and takes it back.
        """
        stats = torch.cuda.memory_stats(self.device)
        ran_out, reserved = stats["num_alloc_retries"], stats["reserved_bytes.all.current"]
        needed = sum(box.values.nbytes for s in tensors.values() for box in s.boxes if box.values.is_cuda)
        kept = (
            self._kept is not None
            and self._kept[0] == ran_out
            and needed <= self._kept[1]
            and reserved >= self._kept[2]
        )
        free, total = torch.cuda.mem_get_info(self.device)
        if free - (0 if kept else needed) < _SPARE * total:
            return None
        try:
            aside = _each(tensors, lambda n, box: box.values.clone() if box.values.is_cuda else self._stage_one(n, box))
        except torch.OutOfMemoryError:
            self._kept = None
            return None
        if not kept:
            self._kept = ran_out, needed, torch.cuda.memory_reserved(self.device)
        return aside

    def _bring(self, aside: dict[str, Spread], copies: torch.cuda.Stream) -> dict[str, Spread]:
        """To the host, and none is left aside. In the thread, a piece at a time: whatever else the training brings to
        the host, one number even, waits behind all that is queued (94 ms behind 5 GB on an H200)."""
        passed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        staged: dict[str, Spread] = {}
        queued = 0

        def pass_by() -> None:
            passed.record(copies)
            passed.synchronize()

        def bring(name: str, box: Box) -> Tensor:
            nonlocal queued
            held = self._held(name, box)
            if held is not box.values:
                for target, source in _pieces(held, box.values):
                    target.copy_(source, non_blocking=True)
                    queued += source.nbytes
                    if queued >= _PIECE:
                        pass_by()
                        queued = 0
            return held

        with torch.cuda.stream(copies):
            for name in list(aside):
                staged |= _each({name: aside.pop(name)}, bring)
            pass_by()
        return staged

    def _stage_one(self, name: str, box: Box) -> Tensor:
        return self._held(name, box).copy_(box.values, non_blocking=True)

    def _held(self, name: str, box: Box) -> Tensor:
        key = (name, box.offsets)
        held = self._staged.get(key)
        if held is None or held.shape != box.values.shape or held.dtype != box.values.dtype:
            if self._copies is not None:
                held = self._pinned.like(box.values)
            else:
                held = torch.empty(box.values.shape, dtype=box.values.dtype)
            self._staged[key] = held
        return held


def _pieces(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if not source.is_contiguous():
        return iter([(target, source)])
    many = _PIECE // source.element_size()
    return zip(torch.split(target.view(-1), many), torch.split(source.view(-1), many), strict=True)


def _each(tensors: dict[str, Spread], of: Callable[[str, Box], Tensor]) -> dict[str, Spread]:
    return {
        name: Spread(spread.shape, [Box(box.offsets, of(name, box)) for box in spread.boxes])
        for name, spread in tensors.items()
    }


def _write(
    path: Path,
    snapshot: Snapshot,
    writer: TensorWriter,
    then: Callable[[], None],
    bring: Callable[[], dict[str, Spread]] | None,
) -> Outcome:
    began = time.monotonic()
    outcome = Outcome(path)
    try:
        if bring is not None:
            _together(lambda: snapshot.tensors.update(bring()), writer.group)
        outcome.bytes = publish(path, snapshot, writer)
        if dist.get_rank() == 0:
            try:
                then()
            except OSError as error:  # what was to be removed is held open, say: the checkpoint is there
                print(f"checkpoint {path} is written, and tidying up failed: {error}", flush=True)
    except SaveError as error:
        outcome.error = str(error)
    outcome.seconds = time.monotonic() - began
    return outcome


def _afterwards(
    outcome_of: Callable[[], Outcome], path: Path, work: Callable[[], None], group: dist.ProcessGroup | None
) -> Outcome:
    outcome = outcome_of()
    if outcome.error is None:
        try:
            _together(lambda: work() if dist.get_rank() == 0 else None, group)
        except SaveError as error:
            outcome = replace(outcome, path=path, error=str(error))
    return outcome


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
        _together(prepare, group)
        for own in _together(write_own, group):
            files |= own
        _together(seal, group)
    except SaveError:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return sum(int(file["bytes"]) for file in files.values())


def _together(work: Callable[[], _T], group: dist.ProcessGroup | None) -> list[_T]:
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
