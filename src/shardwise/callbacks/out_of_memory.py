"""Turns out-of-memory errors into a message: what the rank held, what it requested, and what to change."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise import accelerator
from shardwise.after_run import draw_memory
from shardwise.errors import OutOfMemoryError, RunStopped
from shardwise.metrics.memory_profile import summarize_memory
from shardwise.metrics.memory_remedies import GpuMemory, host_remedies, remedies
from shardwise.plan import Plan
from shardwise.run_dir.files import memory_snapshot

_HOST_TEXT = "DefaultCPUAllocator: can't allocate memory"
_HISTORY_ENTRIES = 100_000  # the newest allocations, a few hundred bytes each
_GIB = {"bytes": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}


class OutOfMemoryWatch(Callback):
    """Turns an out-of-memory error into one message: as a context manager around a rank's whole run.

    As a callback it measures the memory before Lightning tears down, which frees the memory and forgets the stage.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.message: str | None = None

    def __enter__(self) -> OutOfMemoryWatch:
        return self

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.message is None and is_out_of_memory(exception):
            self.message = explain(self.plan, exception, doing(trainer))

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        """Raises OutOfMemoryError in place of an error that is one or came of one."""
        if error is not None and not isinstance(error, RunStopped) and is_out_of_memory(error):
            raise OutOfMemoryError(self.message or explain(self.plan, error, "while starting")) from error


def start_history(plan: Plan) -> None:
    """Record where each block of memory comes from, for the snapshot. The rank's device must be set before."""
    if plan.memory_history:
        accelerator.record_memory_history(_HISTORY_ENTRIES)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is an out-of-memory error or was caused by one: compilers and data workers wrap errors."""
    return _root(error) is not None


def _root(error: BaseException) -> BaseException | None:
    """The out-of-memory error in the chain of causes; None: there is none."""
    texts = (*accelerator.OUT_OF_MEMORY_TEXTS, _HOST_TEXT)
    for each in _chain(error):
        if isinstance(each, accelerator.OutOfMemory | MemoryError) or any(text in str(each) for text in texts):
            return each
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def doing(trainer: Trainer) -> str:
    """What the run is doing, in words."""
    if trainer.training:
        started = trainer.fit_loop.epoch_loop.batch_progress.current.ready > 0
        return f"training, in step {trainer.global_step + 1}" if started else "before the first training step"
    stage = {"validate": "validating", "test": "testing", "predict": "predicting"}
    activity = stage.get(str(trainer.state.stage and trainer.state.stage.value), "while starting")
    return f"{activity} after step {trainer.global_step}" if trainer.state.fn == "fit" else activity


def explain(plan: Plan, error: BaseException, doing: str) -> str:
    """The whole message, of several lines. On CUDA it also writes a memory snapshot and names its file."""
    root = _root(error) or error
    on_host = plan.accelerator != "cpu" and (isinstance(root, MemoryError) or _HOST_TEXT in str(root))
    memory = None if on_host or plan.accelerator == "cpu" else measure()
    rank, requested = int(os.environ.get("RANK", "0")), requested_gib(str(root))
    lines = [f"rank {rank} is out of {'host ' if on_host else ''}memory: {doing}, "
             f"micro_batch_size={plan.micro_batch_size}"]  # fmt: skip
    numbers = [] if requested is None else [f"{requested:,.2f} GiB were asked for"]
    if memory is not None:
        numbers.append(
            f"{memory.allocated:.2f} GiB are allocated, {memory.reserved:.2f} reserved (these included), "
            f"{memory.free:.2f} of {memory.total:.2f} free on GPU {_gpu_index()}"
        )
    lines += ["  " + "; ".join(numbers)] if numbers else []
    changes = host_remedies(plan) if on_host else remedies(plan, memory, requested)
    lines += ["  what would need less, the cheapest first:", *(f"    {change}" for change in changes)]
    if memory is not None and plan.accelerator == "cuda" and (snapshot := write_snapshot(plan, rank)) is not None:
        more = "" if plan.memory_history else "; memory_history=true adds what allocated each block"
        lines.append(f"  {snapshot} shows every block: open it at https://pytorch.org/memory_viz{more}")
        if (picture := draw_snapshot(plan, rank)) is not None:
            lines.append(f"  {picture} has the largest of them, and needs no web page")
    return "\n".join(lines)


def requested_gib(text: str) -> float | None:
    """The size that an allocator's message says was requested, in GiB."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", text)
    return float(found[1]) * _GIB[found[2]] if found else None


def measure() -> GpuMemory | None:
    """The memory of this rank's GPU; None: it does not answer any more."""
    with suppress(RuntimeError):
        if (device := accelerator.current_device()) is None:
            return None
        free, total = accelerator.free_and_total(device)
        allocated, reserved = accelerator.allocated(device), accelerator.reserved(device)
        return GpuMemory(*(size / 2**30 for size in (allocated, reserved, free, total)))
    return None


def _gpu_index() -> int:
    device = accelerator.current_device()
    return 0 if device is None else device.index


def write_snapshot(plan: Plan, rank: int) -> Path | None:
    """Write a snapshot of every block that the allocator holds; None: it could not be written.

    With `memory_history` it also shows what allocated each block.
    """
    path = memory_snapshot(plan.run_dir, rank)
    with suppress(OSError, RuntimeError):
        accelerator.dump_memory_snapshot(str(path))
        return path
    return None


def draw_snapshot(plan: Plan, rank: int) -> Path | None:
    """Draw what the allocator holds; None: that was not possible, which must not hide the error itself."""
    path = memory_snapshot(plan.run_dir, rank).with_suffix(".png")
    with suppress(Exception):
        if draw_memory(summarize_memory(accelerator.memory_snapshot(), device=_gpu_index()), path):
            return path
    return None
