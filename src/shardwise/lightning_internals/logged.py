"""What `self.log` is given, on its way to Lightning's collections: a strategy may change it, refuse it or drop it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection


@dataclass(frozen=True)
class LoggedValue:
    """`hook`: the step or hook that logs. `value`: a tensor, or a metric. `options`: what else `self.log` is given."""

    hook: str
    name: str
    value: Any
    options: dict[str, Any]


class LoggedResults(_ResultCollection):
    """Lightning's collection of logged values."""

    take: Callable[[LoggedValue], Any] | None = None  # gives the value that is logged; None: it is left out

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        taken = value if self.take is None else self.take(LoggedValue(fx, name, value, options))
        if taken is not None:
            super().log(fx, name, taken, **options)


def take_logged_by(trainer: Trainer, take: Callable[[LoggedValue], Any]) -> None:
    """Log what `take` gives for each value that the module and its callbacks log in training and evaluation."""
    for loop in (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop,
                 trainer.test_loop):  # fmt: skip
        assert isinstance(loop._results, LoggedResults)
        loop._results.take = take
