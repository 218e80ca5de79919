"""Counts the graphs that are compiled while training, and says why if they are many."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

_HANDFUL = 5  # with more compilations than this after the first step, the run warns
_NAMED = 3  # so many causes are named


class Recompilations:
    """Called after each step. The first step and evaluation compile graphs of their own, which do not count."""

    def __init__(self, scope: str) -> None:
        self.scope = scope  # the value of compile=
        self.count = 0
        self.graphs = 0  # compiled so far
        self._expected = True
        self._known: set[str | None] = set()  # the compilations whose causes do not count
        self._causes: Counter[str] = Counter()

    def expect(self) -> None:
        """Do not count what has been compiled since the last step: an evaluation ran."""
        self._expected = True

    def after_step(self, *, warns: bool) -> None:
        """`warns`: whether this rank tells the user."""
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        new, self.graphs = graphs - self.graphs, graphs
        is_expected, self._expected = self._expected, False
        if new <= 0:
            return
        compilations = [m for m in torch._dynamo.utils.get_compilation_metrics() if m.compile_id not in self._known]
        self._known.update(m.compile_id for m in compilations)
        if is_expected:
            return
        self._causes.update(cause for m in compilations if (cause := _cause(m)) is not None)
        before, self.count = self.count, self.count + new
        if warns and before <= _HANDFUL < self.count:
            warnings.warn(self._message(), stacklevel=2)

    def _message(self) -> str:
        most = self._causes.most_common(_NAMED)
        named = (f"{cause} ({times} times)" if times > 1 else cause for cause, times in most)
        causes = "; ".join(named) or "torch does not say what; TORCH_LOGS=recompiles may"
        return (
            f"compile={self.scope}: {self.count} graphs were compiled after the first step, each in seconds, because "
            f"something changes from step to step: {causes}. Keep it the same, or use compile=none"
        )


def _cause(compilation: Any) -> str | None:
    """Which function was compiled again, and which guard failed. None: a backward pass, which follows its forward."""
    if compilation.co_name is None:
        return None
    where = f"{compilation.co_name} ({Path(compilation.co_filename or '').name}:{compilation.co_firstlineno})"
    if compilation.recompile_reason is None:
        return f"{where} ran for the first time"
    reason = compilation.recompile_reason.splitlines()[0]
    return f"{where}: {reason.partition(': ')[2] or reason}"  # without the number of the compilation
