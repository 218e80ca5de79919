"""Records what a rank does in some steps, and writes it down beside the training."""

from __future__ import annotations

import gzip
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils.hooks import RemovableHandle

from shardwise.accelerator import (
    begin_range,
    end_memory_history,
    end_range,
    memory_snapshot,
    profiled_activities,
    record_memory_history,
    start_capture,
    stop_capture,
    synchronize,
)
from shardwise.after_run import draw_memory
from shardwise.distributed.dtensor import local_part
from shardwise.metrics.memory_profile import Known, Span, summarize_memory
from shardwise.run_dir.files import partial_path, profile_memory, profile_trace, put_in_place, write_whole


class Recorder(Protocol):
    """What records the profiled steps of this rank."""

    def prepare(self) -> None:
        """Called a step before, so that the first recorded step does not pay for the set-up."""

    def start(self) -> None: ...

    def stop(self) -> None:
        """Waits until the device has done what the recorded steps have asked of it."""

    def write(self, folder: Path, rank: int) -> None:
        """Write what was recorded. Called in a thread of its own. Raises OSError."""


class TorchRecorder:
    """A trace of torch's profiler, as the Chrome format has it."""

    def __init__(self, device: torch.device, *, stacks: bool) -> None:
        self.device = device
        # torch 2.13 prints two lines for each profile, "USDT:…". Of a GPU its errors would be silenced with them
        if device.type == "cpu":
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profile: profile | None = profile(activities=profiled_activities(device), with_stack=stacks)
        self._prepared = False

    def prepare(self) -> None:
        assert self._profile is not None
        self._profile.prepare_trace()
        self._prepared = True

    def start(self) -> None:
        assert self._profile is not None
        if not self._prepared:
            self._profile.prepare_trace()
        self._profile.start_trace()

    def stop(self) -> None:
        assert self._profile is not None
        self._profile.stop_trace()

    def write(self, folder: Path, rank: int) -> None:
        recorded, self._profile = self._profile, None
        assert recorded is not None
        path = profile_trace(folder, rank)
        plain = partial_path(path.with_suffix(""))
        try:
            recorded.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(partial_path(path), "wb", compresslevel=5) as target:
                shutil.copyfileobj(source, target, 2**20)
            put_in_place(path)
        finally:
            with suppress(OSError):
                plain.unlink(missing_ok=True)


class NsightRecorder:
    """Tells Nsight, which was started before this program, when to record."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prepare(self) -> None: ...

    def start(self) -> None:
        synchronize(self.device)
        start_capture()

    def stop(self) -> None:
        synchronize(self.device)
        stop_capture()

    def write(self, folder: Path, rank: int) -> None: ...


# Records, on CUDA, what holds memory in the steps of a profile.

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


# Names the phases of a step in a profile. Nothing of it is there outside of the profiled steps.

STEP = "ProfilerStep#{}"  # torch's own name, which other readers of traces know
PREFIX = "shardwise::"  # before data, forward, backward, optimizer, save, validation


class Marks:
    """Opens and closes named ranges of torch's profiler, or NVTX ranges for Nsight. The last one closes first."""

    def __init__(self, *, nvtx: bool, silent: bool = False) -> None:
        self.nvtx, self.silent = nvtx, silent
        self.spans: list[tuple[str, int, int]] = []  # the phases that are over: name, begin and end in ns since 1970
        self._open: list[tuple[str, torch.profiler.record_function | None, int]] = []

    def open(self, name: str) -> None:
        record = None
        if self.nvtx and not self.silent:
            begin_range(name)
        elif not self.silent:
            record = torch.profiler.record_function(name)
            record.__enter__()  # type: ignore[no-untyped-call]
        self._open.append((name, record, time.time_ns()))

    def close(self, name: str) -> None:
        """Close the range `name`, with those that were opened in it. Nothing happens if it is not open."""
        while any(name == other for other, _, _ in self._open):
            inner, record, begin = self._open.pop()
            if inner.startswith(PREFIX):
                self.spans.append((inner.removeprefix(PREFIX), begin, time.time_ns()))
            if self.nvtx and not self.silent:
                end_range()
            elif record is not None:
                record.__exit__(None, None, None)

    def close_all(self) -> None:
        if self._open:
            self.close(self._open[0][0])


class Phases:
    """Marks the calls of some methods while it is installed."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self._undo: list[Callable[[], Any]] = []

    def mark(self, owner: Any, method: str, phase: str) -> None:
        """Mark each call of `owner.method` as `phase`."""
        original, name = getattr(owner, method), PREFIX + phase

        def marked(*args: Any, **kwargs: Any) -> Any:
            self.marks.open(name)
            try:
                return original(*args, **kwargs)
            finally:
                self.marks.close(name)

        self._replace(owner, method, marked)

    def mark_after_closure(self, precision: Any, phase: str, between: Callable[[], Any] = lambda: None) -> None:
        """Mark what `precision.optimizer_step` does after its closure, which is the forward and backward pass.

        `between` is called when the closure is done.
        """
        original, name = precision.optimizer_step, PREFIX + phase

        def marked(optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
            def then() -> Any:
                result = closure()
                between()
                self.marks.open(name)
                return result

            automatic = model.automatic_optimization  # else the closure is called within optimizer.step
            if not automatic:
                between()
                self.marks.open(name)
            try:
                return original(optimizer, model=model, closure=then if automatic else closure, **kwargs)
            finally:
                self.marks.close(name)

        self._replace(precision, "optimizer_step", marked)

    def mark_units(self, units: dict[str, nn.Module]) -> None:
        """Mark the forward pass of each unit. `units`: by their names."""
        for name, unit in units.items():
            label = f"unit {name}"
            self._remove_later(unit.register_forward_pre_hook(lambda *_, label=label: self.marks.open(label)))
            self._remove_later(
                unit.register_forward_hook(lambda *_, label=label: self.marks.close(label), always_call=True)
            )

    def remove(self) -> None:
        """Put everything back as it was."""
        while self._undo:
            self._undo.pop()()
        self.marks.close_all()

    def _replace(self, owner: Any, method: str, replacement: Callable[..., Any]) -> None:
        own = vars(owner).get(method)
        setattr(owner, method, replacement)
        self._undo.append(lambda: delattr(owner, method) if own is None else setattr(owner, method, own))

    def _remove_later(self, handle: RemovableHandle) -> None:
        self._undo.append(handle.remove)
