"""What `self.log` is given, on its way to Lightning's collections: a strategy may change it, refuse it or drop it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection


@dataclass
class LoggedValue:
    """`hook`: the step or hook that logs. `value`: a tensor, or a metric. `options`: what else `self.log` is given."""

    hook: str
    name: str
    value: Any
    options: dict[str, Any]


class LoggedResults(_ResultCollection):
    """Lightning's collection of logged values."""

    take: Callable[[LoggedValue], bool] | None = None  # may change a value, and gives whether it is logged

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        logged = LoggedValue(fx, name, value, options)
        if self.take is None or self.take(logged):
            super().log(fx, name, logged.value, **logged.options)


def take_logged_by(trainer: Trainer, take: Callable[[LoggedValue], bool]) -> None:
    """Ask `take` about every value that the module and its callbacks log in training and evaluation."""
    for loop in (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop,
                 trainer.test_loop):  # fmt: skip
        assert isinstance(loop._results, LoggedResults)
        loop._results.take = take
