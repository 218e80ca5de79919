"""Records, on CUDA, what holds memory in the steps of a profile."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from shardwise.accelerator import end_memory_history, memory_snapshot, record_memory_history
from shardwise.after_run import draw_memory
from shardwise.distributed.dtensor import local_part
from shardwise.metrics.memory_profile import Known, Span, summarize_memory
from shardwise.run_dir.files import profile_memory, write_whole

_ENTRIES = 500_000  # the newest allocations and frees


class MemoryRecorder:
    """Knows where the run's tensors lie when the window opens, and where gradients lie before each step.

    `keeps_history`: the run records the history anyway, and goes on with that.
    """

    def __init__(self, device: torch.device, *, keeps_history: bool) -> None:
        self.device, self.keeps_history = device, keeps_history
        self.known: list[Known] = []
        self._begin_us = 0.0
        self._content: dict[str, Any] = {}

    def start(self, module: LightningModule, optimizers: Iterable[Any], more: Mapping[str, Iterable[Tensor]]) -> None:
        """Begin to record. `more`: the strategy's own tensors by category."""
        if not self.keeps_history:
            record_memory_history(_ENTRIES)
        self._begin_us = now_us()
        parameters = list(module.parameters())
        self._note("parameters", (*parameters, *module.buffers()))
        for optimizer in optimizers:
            self._note("optimizer", _tensors_of(optimizer, {id(parameter) for parameter in parameters}))
        for category, tensors in more.items():
            self._note(category, tensors)

    def note_gradients(self, module: LightningModule) -> None:
        self._note("gradients", (p.grad for p in module.parameters() if p.grad is not None))

    def stop(self) -> None:
        self._content = memory_snapshot()
        if not self.keeps_history:
            end_memory_history()

    def write(self, folder: Path, rank: int, spans: Iterable[Span]) -> str:
        """Write the summary and its picture. Returns some lines for the user. Raises OSError."""
        summary = summarize_memory(
            self._content, device=self.device.index or 0, known=self.known, spans=spans, begin_us=self._begin_us
        )
        self._content = {}
        path = profile_memory(folder, rank)
        write_whole(path, summary.to_json())
        draw_memory(summary, path.with_suffix(".png"))
        return summary.text

    def _note(self, category: str, tensors: Iterable[Tensor]) -> None:
        time_us = now_us()
        for tensor in tensors:
            local = local_part(tensor)
            if not local.is_meta and local.numel():
                self.known.append(Known(category, local.data_ptr(), time_us))


def _tensors_of(optimizer: Any, parameters: set[int]) -> Iterable[Tensor]:
    """An optimizer's state, and what it steps on where that is not the module's own parameters: master weights."""
    inner = getattr(optimizer, "optimizer", optimizer)  # DeepSpeed's optimizers have another one inside
    for group in inner.param_groups:
        yield from (parameter for parameter in group["params"] if id(parameter) not in parameters)
    for state in inner.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def now_us() -> float:
    """The time on the clock of a snapshot's history, in µs."""
    return time.time_ns() / 1e3
