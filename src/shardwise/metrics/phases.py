"""Names the phases of a step in a profile. Nothing of it is there outside of the profiled steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.accelerator import begin_range, end_range

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
