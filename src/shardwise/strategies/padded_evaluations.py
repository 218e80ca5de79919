"""The batches of an evaluation. Those that are padding leave nothing behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from shardwise.lightning_internals.padding import PaddingBatch


class PaddedEvaluations(Strategy):
    """A part of `PlannedStrategy`."""

    _begin_evaluation: Callable[[], None]
    _run_step: Callable[..., Any]
    _padding: PaddingBatch | None = None  # the current one

    def _prepare_padding(self) -> None:
        self._paddings: deque[bool] = deque()  # whether each evaluation batch that the loader gave is padding

    def _begin_padding(self, trainer: Trainer) -> None:
        """Called before the first hook of a batch."""
        self._padding = PaddingBatch(trainer) if not trainer.training and self._paddings and self._paddings[0] else None

    def _evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._begin_evaluation()
        if not self._paddings.popleft():
            return self._run_step(name, *args, **kwargs)
        self._run_step(name, *args, **kwargs)
        return None

    def end_evaluation_batch(self) -> None:
        """Called after the last hook of a batch."""
        padding, self._padding = self._padding, None
        if padding is not None:
            padding.take_back()
