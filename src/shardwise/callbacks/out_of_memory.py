"""A rank that runs out of memory says what it held, what it asked for and what to change, in place of a traceback."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.errors import OutOfMemoryError, RunStopped
from shardwise.forecast.remedies import GpuMemory, host_remedies, remedies
from shardwise.plan import Plan

_GPU_TEXTS = ("CUDA out of memory", "CUDA error: out of memory")
_HOST_TEXT = "DefaultCPUAllocator: can't allocate memory"
_HISTORY_ENTRIES = 100_000  # the newest allocations, a few hundred bytes each
_GIB = {"bytes": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}


class OutOfMemoryWatch(Callback):
    """Around a rank's whole life: `with` turns what was raised into one message.

    As a callback it looks at the memory before Lightning tears down, which lets go of it and forgets the stage.
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
    """From here on the snapshot knows where each block came from. After the rank's device has been set."""
    if plan.memory_history:
        torch.cuda.memory._record_memory_history(max_entries=_HISTORY_ENTRIES, stacks="python")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it is one, or came of one: a compiler or a data worker may have wrapped it."""
    return _root(error) is not None


def _root(error: BaseException) -> BaseException | None:
    """The error of the chain that is out of memory itself."""
    texts = (*_GPU_TEXTS, _HOST_TEXT)
    for each in _chain(error):
        if isinstance(each, torch.OutOfMemoryError | MemoryError) or any(text in str(each) for text in texts):
            return each
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def doing(trainer: Trainer) -> str:
    """Where the run is, in words."""
    if trainer.training:
        started = trainer.fit_loop.epoch_loop.batch_progress.current.ready > 0
        return f"training, in step {trainer.global_step + 1}" if started else "before the first training step"
    stage = {"validate": "validating", "test": "testing", "predict": "predicting"}
    words = stage.get(str(trainer.state.stage and trainer.state.stage.value), "while starting")
    return f"{words} after step {trainer.global_step}" if trainer.state.fn == "fit" else words


def explain(plan: Plan, error: BaseException, doing: str) -> str:
    """The whole message, in lines; on CUDA it names the snapshot that it has written."""
    root = _root(error) or error
    on_host = plan.accelerator == "cuda" and (isinstance(root, MemoryError) or _HOST_TEXT in str(root))
    memory = None if on_host or plan.accelerator == "cpu" else measure()
    rank, asked = int(os.environ.get("RANK", "0")), asked_gib(str(root))
    lines = [f"rank {rank} is out of {'host ' if on_host else ''}memory: {doing}, "
             f"micro_batch_size={plan.micro_batch_size}"]  # fmt: skip
    numbers = [] if asked is None else [f"{asked:,.2f} GiB were asked for"]
    if memory is not None:
        numbers.append(
            f"{memory.allocated:.2f} GiB are allocated, {memory.reserved:.2f} reserved (these included), "
            f"{memory.free:.2f} of {memory.total:.2f} free on GPU {torch.cuda.current_device()}"
        )
    lines += ["  " + "; ".join(numbers)] if numbers else []
    words = host_remedies(plan) if on_host else remedies(plan, memory, asked)
    lines += ["  what would need less, the cheapest first:", *(f"    {word}" for word in words)]
    if memory is not None and (snapshot := write_snapshot(plan, rank)) is not None:
        more = "" if plan.memory_history else "; memory_history=true adds what allocated each block"
        lines.append(f"  {snapshot} shows every block: open it at https://pytorch.org/memory_viz{more}")
    return "\n".join(lines)


def asked_gib(text: str) -> float | None:
    """The size that an allocator's message names."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", text)
    return float(found[1]) * _GIB[found[2]] if found else None


def measure() -> GpuMemory | None:
    """None where CUDA does not answer any more."""
    with suppress(RuntimeError):
        free, total = torch.cuda.mem_get_info()
        held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        return GpuMemory(*(size / 2**30 for size in (*held, free, total)))
    return None


def write_snapshot(plan: Plan, rank: int) -> Path | None:
    """What the allocator holds, block by block; with `memory_history` how it came to. None: it could not be written."""
    path = Path(plan.run_dir) / f"memory-rank{rank}.pickle"
    with suppress(OSError, RuntimeError):
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        return path
    return None
