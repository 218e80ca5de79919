"""A rank that runs out of memory says what it held, what it asked for and what to change, in place of a traceback."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.errors import OutOfMemoryError, RunStopped
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


@dataclass(frozen=True)
class GpuMemory:
    """What the allocator of this rank's GPU holds, in GiB."""

    allocated: float  # in tensors
    reserved: float  # from the GPU, these included
    free: float
    total: float


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


def remedies(plan: Plan, memory: GpuMemory | None, asked: float | None) -> list[str]:
    """What to change, as words for the command line; only what this Plan has not done yet."""
    strategy, ranks, trains = plan.strategy, plan.topology.world_size, plan.stage == "fit"
    words = []
    if (smaller := smaller_micro_batch_size(plan)) is not None:
        words.append(f"micro_batch_size={smaller}" + (f" (global_batch_size={plan.global_batch_size} stays)" * trains))
    if trains and plan.activation_checkpointing == "none":
        words.append("activation_checkpointing=full (recomputes each repeated layer in backward)")
    if strategy.name.startswith("fsdp") and not strategy.reshard_after_forward:
        words.append("strategy.reshard_after_forward=true")
    if strategy.name.startswith("fsdp") and strategy.defer_gradient_sync:
        words.append("strategy.defer_gradient_sync=false")
    sharded = "zero3" if strategy.zero_stage and plan.compile != "model" else "fsdp"
    if strategy.name not in ("fsdp", "zero3") and ranks > 1:
        words.append(f"strategy={sharded} (parameters, gradients and optimizer state sharded over the {ranks} ranks)")
    if trains and plan.accelerator == "cuda" and plan.precision.name != "fp64":
        if not strategy.zero_stage:
            words.append("strategy=zero2 strategy.offload_optimizer=true (its state and step on the CPU; DeepSpeed)")
        elif not strategy.offload_optimizer:
            words.append("strategy.offload_optimizer=true (its state and step on the CPU)")
    if strategy.zero_stage == 3 and plan.accelerator == "cuda" and not strategy.offload_parameters:
        words.append("strategy.offload_parameters=true")
    if memory is not None and _is_fragmented(memory, asked):
        words.append(
            f"PYTORCH_ALLOC_CONF=expandable_segments:True in the environment ({memory.reserved - memory.allocated:.2f} "
            f"GiB are reserved and in no tensor)"
        )
    if ranks == 1:
        words.append("devices=N strategy=fsdp, on a machine with N GPUs" if strategy.name == "ddp" else "more devices")
    return words or ["a smaller model, shorter samples or more devices"]


def host_remedies(plan: Plan) -> list[str]:
    """Of a rank on a GPU whose host has no memory left."""
    offloads = {
        "offload_optimizer": plan.strategy.offload_optimizer,
        "offload_parameters": plan.strategy.offload_parameters,
    }
    words = [f"strategy.{word}=false" for word, is_on in offloads.items() if is_on]
    if plan.stage == "fit" and plan.checkpoint.saves and plan.checkpoint.asynchronous:
        words.append("checkpoint.asynchronous=false (a save then needs no copy of what a rank holds)")
    if plan.data is not None and plan.data.get("num_workers"):
        words.append(f"fewer data.num_workers than {plan.data['num_workers']}, of each of the ranks on this machine")
    return words or ["fewer processes on this machine, or one with more memory"]


def smaller_micro_batch_size(plan: Plan) -> int | None:
    """The largest that is at most half and leaves the global batch a whole number of micro-batches."""
    each = plan.global_batch_size // plan.topology.data_parallel_size
    return next((size for size in range(plan.micro_batch_size // 2, 0, -1) if each % size == 0), None)


def _is_fragmented(memory: GpuMemory, asked: float | None) -> bool:
    """What was asked for, or a tenth of the GPU, lies in pieces in the allocator's hands."""
    told = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    unused = memory.reserved - memory.allocated
    return "expandable_segments:True" not in told and unused >= min(asked or memory.total, memory.total / 10)
