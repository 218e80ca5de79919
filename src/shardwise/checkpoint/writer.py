"""Writes checkpoints, in a thread beside the training or while it waits. A checkpoint is complete or does not exist.

Every rank writes its chunks, through DCP, and a file of its own into `<name>.partial`. Sizes and checksums of all files
go into manifest.json, which is written last. Then the folder gets its name. A folder without a manifest is no
checkpoint.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import accelerator
from shardwise.checkpoint.dcp import Chunk, ChunkedTensor, TensorWriter
from shardwise.checkpoint.files import Pace
from shardwise.checkpoint.publish import SaveError, Snapshot, publish, run_on_every_rank

# Pinned host memory that a save copies the device's tensors into.

SPARE_SHARE = 0.05  # the share of a device's memory that a save leaves free
_SLAB = 2**26  # bytes that are allocated at a time for small tensors


class PinnedMemory:
    """Allocates pinned memory of the host without holding up the training.

    For torch's pinned memory the driver makes the pages while it holds its lock, and the training can launch nothing
    in the meantime: 15 s for 24 GB. Here the pages are made first. (torch's `pinned_use_cuda_host_register` would do
    so too, but for the whole process, and it rounds 1.1 GB up to 2.)
    """

    def __init__(self) -> None:
        self._slabs: list[tuple[mmap.mmap, int]] = []  # each with its address
        self._shared, self._used = mmap.mmap(-1, 1), 1  # the slab that small tensors share, and its bytes in use

    def like(self, values: Tensor) -> Tensor:
        """An uninitialized pinned tensor of the form of `values`. It has a storage of its own, as DCP needs it."""
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
            slab.madvise(mmap.MADV_DONTFORK)  # after a fork the child could keep the pages that the device copies to
            with suppress(OSError):  # some kernels have no huge pages
                slab.madvise(mmap.MADV_HUGEPAGE)
            address = torch.frombuffer(slab, dtype=torch.uint8).zero_().data_ptr()
            accelerator.register_pinned(address, bytes_)
        except (OSError, accelerator.PinError) as error:
            raise MemoryError(
                f"Tried to allocate {bytes_ / 2**20:.0f} MiB of the host's memory, pinned, for a checkpoint: {error}"
            ) from None
        self._slabs.append((slab, address))
        return slab

    def close(self) -> None:
        while self._slabs:
            accelerator.unregister_pinned(self._slabs.pop()[1])
        self._shared, self._used = mmap.mmap(-1, 1), 1


_PIECE = 2**25  # bytes that are copied to the host at a time


@dataclass
class Outcome:
    """How a save has ended."""

    path: Path
    seconds: float = 0.0  # the time that writing took
    bytes: int = 0  # the size of all ranks' files
    error: str | None = None

    @property
    def is_of_step(self) -> bool:
        """Whether it is of a step's regular checkpoint, and not of the best one."""
        return self.path.name.startswith("step-")


@dataclass
class Writer:
    """Saves checkpoints, one at a time.

    It has a process group of its own, so that a save in a thread does not meet the training's collectives.
    """

    asynchronous: bool
    device: torch.device
    timeout: timedelta  # the time in which a rank must have written its part
    outcome: Outcome | None = None  # how the last finished save has ended
    _pending: Future[Outcome] | None = None
    _staged: dict[tuple[str, tuple[int, ...]], Tensor] = field(default_factory=dict)  # host memory that saves reuse
    _pinned: PinnedMemory = field(default_factory=PinnedMemory)
    # The allocator's retries, the bytes needed and the bytes reserved when the copying stream got its memory: see
    # `_copy_on_device`
    _kept: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        group = dist.new_group(backend="gloo", timeout=self.timeout) if dist.get_world_size() > 1 else None
        self._writer = TensorWriter(group)
        self._thread = ThreadPoolExecutor(1, "checkpoint") if self.asynchronous else None
        self._copies: accelerator.Stream | None = None
        if self._thread is not None and self.device.type == "cuda":
            # Without this the thread would open a CUDA context on the first GPU
            self._thread.submit(accelerator.set_device, self.device)
            self._copies = accelerator.new_stream(self.device)

    @property
    def busy(self) -> bool:
        return self._pending is not None and not self._pending.done()

    @property
    def ended(self) -> Outcome | None:
        """The outcome of the save under way, where that has ended; None: `wait` would have to wait."""
        pending = self._pending
        return pending.result() if pending is not None and pending.done() and not pending.exception() else None

    def save(self, path: Path, snapshot: Snapshot, then: Callable[[], None]) -> accelerator.Event | None:
        """Write `snapshot`, and call `then` on rank 0 when it is published. Collective; waits for the save before.

        Returns:
            The event that the next change of weights or optimizer state has to wait for; None: nothing has to wait.
            Everything else is copied already.
        """
        self.wait()
        self._writer.set_pace(Pace(beside_training=self.asynchronous))
        if self._thread is None:
            self.outcome = _write(path, snapshot, self._writer, then, None)
            return None
        staged_tensors, copied = self._stage(snapshot)
        snapshot = replace(snapshot, tensors={})
        self._pending = self._thread.submit(_write, path, snapshot, self._writer, then, staged_tensors)
        return copied

    def also(self, work: Callable[[], None]) -> None:
        """Call `work` on rank 0 when the save under way, or else the last one, is published; never if it failed."""
        if dist.get_rank() != 0:
            return
        if self._thread is not None and self._pending is not None:
            self._pending = self._thread.submit(_afterwards, self._pending.result, work)
        elif self.outcome is not None:
            last = self.outcome
            _afterwards(lambda: last, work)

    def wait(self) -> Outcome | None:
        """Wait until nothing is being written, and return the last outcome, which is the same on all ranks."""
        if self._pending is not None:
            self._writer.pace.hurry()
            pending, self._pending = self._pending, None
            self.outcome = pending.result()
        return self.outcome

    def close(self) -> None:
        """End the thread and the group, once nothing is being written."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            if self._writer.group is not None:
                dist.destroy_process_group(self._writer.take_group())
            self._staged.clear()
            self._pinned.close()

    def _stage(self, snapshot: Snapshot) -> tuple[Callable[[], dict[str, ChunkedTensor]], accelerator.Event | None]:
        """Start to copy the tensors.

        Returns:
            A function, which the thread calls, that returns the copies in the host's memory; and the event that `save`
            returns.
        """
        if self._copies is None:
            staged = _each(snapshot.tensors, self._stage_one)
            return lambda: staged, None
        computing = accelerator.current_stream(self.device)
        self._copies.wait_stream(computing)
        with accelerator.in_stream(self._copies):
            copies = self._copy_on_device(snapshot.tensors)
            if copies is not None:
                computing.wait_stream(self._copies)
                return partial(self._copy_to_host, copies, self._copies), None
            volatile = {name: tensor for name, tensor in snapshot.tensors.items() if name in snapshot.volatile}
            staged = _each(volatile, self._stage_one)
            computing.wait_stream(self._copies)
            staged |= _each({n: s for n, s in snapshot.tensors.items() if n not in volatile}, self._stage_one)
            copied = accelerator.new_event(self.device)
            copied.record(self._copies)

        def arrived() -> dict[str, ChunkedTensor]:
            copied.synchronize()
            return staged

        return arrived, copied

    def _copy_on_device(self, tensors: dict[str, ChunkedTensor]) -> dict[str, ChunkedTensor] | None:
        """Copy the tensors on the device, if there is room. The training waits only for these copies, milliseconds.

        Their memory stays with the copying stream, until the allocator runs out of memory and takes it back.
        """
        ran_out, reserved = accelerator.memory_counts(self.device).retries, accelerator.reserved(self.device)
        needed = sum(chunk.values.nbytes for s in tensors.values() for chunk in s.chunks if chunk.values.is_cuda)
        kept = (
            self._kept is not None
            and self._kept[0] == ran_out
            and needed <= self._kept[1]
            and reserved >= self._kept[2]
        )
        free, total = accelerator.free_and_total(self.device)
        if free - (0 if kept else needed) < SPARE_SHARE * total:
            return None
        try:
            copies = _each(
                tensors, lambda n, chunk: chunk.values.clone() if chunk.values.is_cuda else self._stage_one(n, chunk)
            )
        except accelerator.OutOfMemory:
            self._kept = None
            return None
        if not kept:
            self._kept = ran_out, needed, accelerator.reserved(self.device)
        return copies

    def _copy_to_host(self, copies: dict[str, ChunkedTensor], stream: accelerator.Stream) -> dict[str, ChunkedTensor]:
        """Move the device's copies to the host: `copies` is empty afterwards. The thread calls this.

        It queues one piece at a time, since whatever the training reads back, even one number, waits behind all copies
        that are queued (94 ms behind 5 GB on an H200).
        """
        event = accelerator.new_event(self.device, sleeps=True)
        staged: dict[str, ChunkedTensor] = {}
        queued = 0

        def wait_for_queue() -> None:
            event.record(stream)
            event.synchronize()

        def copy(name: str, chunk: Chunk) -> Tensor:
            nonlocal queued
            memory = self._host_memory(name, chunk)
            if memory is not chunk.values:
                for target, source in _pieces(memory, chunk.values):
                    target.copy_(source, non_blocking=True)
                    queued += source.nbytes
                    if queued >= _PIECE:
                        wait_for_queue()
                        queued = 0
            return memory

        with accelerator.in_stream(stream):
            for name in list(copies):
                staged |= _each({name: copies.pop(name)}, copy)
            wait_for_queue()
        return staged

    def _stage_one(self, name: str, chunk: Chunk) -> Tensor:
        return self._host_memory(name, chunk).copy_(chunk.values, non_blocking=self._copies is not None)

    def _host_memory(self, name: str, chunk: Chunk) -> Tensor:
        """Memory of the host for a chunk: that of the save before, where its form is the same."""
        key = (name, chunk.offsets)
        memory = self._staged.get(key)
        if memory is None or memory.shape != chunk.values.shape or memory.dtype != chunk.values.dtype:
            if self._copies is not None:
                memory = self._pinned.like(chunk.values)
            else:
                memory = torch.empty(chunk.values.shape, dtype=chunk.values.dtype)
            self._staged[key] = memory
        return memory


def _pieces(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if not source.is_contiguous():
        return iter([(target, source)])
    many = _PIECE // source.element_size()
    return zip(torch.split(target.view(-1), many), torch.split(source.view(-1), many), strict=True)


def _each(tensors: dict[str, ChunkedTensor], copy: Callable[[str, Chunk], Tensor]) -> dict[str, ChunkedTensor]:
    """The same chunks with `copy(name, chunk)` as their values."""
    return {
        name: ChunkedTensor(tensor.shape, [Chunk(chunk.offsets, copy(name, chunk)) for chunk in tensor.chunks])
        for name, tensor in tensors.items()
    }


def _write(
    path: Path,
    snapshot: Snapshot,
    writer: TensorWriter,
    then: Callable[[], None],
    staged_tensors: Callable[[], dict[str, ChunkedTensor]] | None,
) -> Outcome:
    began = time.monotonic()
    outcome = Outcome(path)
    try:
        if staged_tensors is not None:
            run_on_every_rank(lambda: snapshot.tensors.update(staged_tensors()), writer.group)
        outcome.bytes = publish(path, snapshot, writer)
        if dist.get_rank() == 0:
            try:
                then()
            except OSError as error:  # for instance, the folder cannot be listed; the new checkpoint is complete
                print(f"checkpoint {path} is written, and tidying up failed: {error}", flush=True)
    except SaveError as error:
        outcome.error = str(error)
    outcome.seconds = time.monotonic() - began
    return outcome


def _afterwards(outcome_of: Callable[[], Outcome], work: Callable[[], None]) -> Outcome:
    outcome = outcome_of()
    if outcome.error is None:
        work()
    return outcome
