"""Writing a checkpoint so that it is there whole or not at all, beside the training or in its way.

Every rank writes into `<name>.partial`, its chunks through DCP and a file of its own; sizes and checksums of all files
go into manifest.json, the last to be written; then the folder gets its name. What has no manifest is no checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.chunks import Chunk, ChunkedTensor
from shardwise.checkpoint.dcp import TensorWriter
from shardwise.checkpoint.files import Pace
from shardwise.checkpoint.pinned_memory import SPARE_SHARE, PinnedMemory
from shardwise.checkpoint.publish import SaveError, Snapshot, publish, run_on_every_rank

_PIECE = 2**25  # bytes


@dataclass
class Outcome:
    path: Path
    seconds: float = 0.0  # of writing
    bytes: int = 0  # of all ranks
    error: str | None = None


@dataclass
class Writer:
    """Saves, one at a time. Its group is its own: a save in a thread does not meet the training's collectives."""

    asynchronous: bool
    device: torch.device
    timeout: timedelta  # for a rank to write its part
    outcome: Outcome | None = None  # of the last save that has ended
    _pending: Future[Outcome] | None = None
    _staged: dict[tuple[str, tuple[int, ...]], Tensor] = field(default_factory=dict)  # memory of the host, reused
    _pinned: PinnedMemory = field(default_factory=PinnedMemory)
    _kept: tuple[int, int, int] | None = None  # when the copying stream got its memory; see _copy_on_device

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
        self._writer.set_pace(Pace(beside_training=self.asynchronous))
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
                dist.destroy_process_group(self._writer.take_group())
            self._staged.clear()
            self._pinned.close()

    def _stage(self, snapshot: Snapshot) -> tuple[Callable[[], dict[str, ChunkedTensor]], torch.cuda.Event | None]:
        """What gives the copies in the host's memory, for the thread to call, and what `save` returns."""
        if self._copies is None:
            staged = _each(snapshot.tensors, self._stage_one)
            return lambda: staged, None
        computing = torch.cuda.current_stream(self.device)
        self._copies.wait_stream(computing)
        with torch.cuda.stream(self._copies):
            aside = self._copy_on_device(snapshot.tensors)
            if aside is not None:
                computing.wait_stream(self._copies)
                return partial(self._copy_to_host, aside, self._copies), None
            volatile = {name: tensor for name, tensor in snapshot.tensors.items() if name in snapshot.volatile}
            staged = _each(volatile, self._stage_one)
            computing.wait_stream(self._copies)
            staged |= _each({n: s for n, s in snapshot.tensors.items() if n not in volatile}, self._stage_one)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._copies)

        def arrived() -> dict[str, ChunkedTensor]:
            copied.synchronize()
            return staged

        return arrived, copied

    def _copy_on_device(self, tensors: dict[str, ChunkedTensor]) -> dict[str, ChunkedTensor] | None:
        """Copies on the device, if there is room: made in milliseconds, and the training waits for these alone.

        Their memory is the copying stream's from then on, until the allocator runs out and takes it back.
        """
        stats = torch.cuda.memory_stats(self.device)
        ran_out, reserved = stats["num_alloc_retries"], stats["reserved_bytes.all.current"]
        needed = sum(chunk.values.nbytes for s in tensors.values() for chunk in s.chunks if chunk.values.is_cuda)
        kept = (
            self._kept is not None
            and self._kept[0] == ran_out
            and needed <= self._kept[1]
            and reserved >= self._kept[2]
        )
        free, total = torch.cuda.mem_get_info(self.device)
        if free - (0 if kept else needed) < SPARE_SHARE * total:
            return None
        try:
            aside = _each(
                tensors, lambda n, chunk: chunk.values.clone() if chunk.values.is_cuda else self._stage_one(n, chunk)
            )
        except torch.OutOfMemoryError:
            self._kept = None
            return None
        if not kept:
            self._kept = ran_out, needed, torch.cuda.memory_reserved(self.device)
        return aside

    def _copy_to_host(self, aside: dict[str, ChunkedTensor], copies: torch.cuda.Stream) -> dict[str, ChunkedTensor]:
        """To the host, and none is left aside. In the thread, a piece at a time: whatever else the training brings to
        the host, one number even, waits behind all that is queued (94 ms behind 5 GB on an H200)."""
        passed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        staged: dict[str, ChunkedTensor] = {}
        queued = 0

        def pass_by() -> None:
            passed.record(copies)
            passed.synchronize()

        def bring(name: str, chunk: Chunk) -> Tensor:
            nonlocal queued
            held = self._held(name, chunk)
            if held is not chunk.values:
                for target, source in _pieces(held, chunk.values):
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

    def _stage_one(self, name: str, chunk: Chunk) -> Tensor:
        return self._held(name, chunk).copy_(chunk.values, non_blocking=True)

    def _held(self, name: str, chunk: Chunk) -> Tensor:
        key = (name, chunk.offsets)
        held = self._staged.get(key)
        if held is None or held.shape != chunk.values.shape or held.dtype != chunk.values.dtype:
            if self._copies is not None:
                held = self._pinned.like(chunk.values)
            else:
                held = torch.empty(chunk.values.shape, dtype=chunk.values.dtype)
            self._staged[key] = held
        return held


def _pieces(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if not source.is_contiguous():
        return iter([(target, source)])
    many = _PIECE // source.element_size()
    return zip(torch.split(target.view(-1), many), torch.split(source.view(-1), many), strict=True)


def _each(tensors: dict[str, ChunkedTensor], of: Callable[[str, Chunk], Tensor]) -> dict[str, ChunkedTensor]:
    return {
        name: ChunkedTensor(tensor.shape, [Chunk(chunk.offsets, of(name, chunk)) for chunk in tensor.chunks])
        for name, tensor in tensors.items()
    }


def _write(
    path: Path,
    snapshot: Snapshot,
    writer: TensorWriter,
    then: Callable[[], None],
    bring: Callable[[], dict[str, ChunkedTensor]] | None,
) -> Outcome:
    began = time.monotonic()
    outcome = Outcome(path)
    try:
        if bring is not None:
            run_on_every_rank(lambda: snapshot.tensors.update(bring()), writer.group)
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
            run_on_every_rank(lambda: work() if dist.get_rank() == 0 else None, group)
        except SaveError as error:
            outcome = replace(outcome, path=path, error=str(error))
    return outcome
