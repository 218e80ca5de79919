"""`resume_allow=[optimizer]`: a run that may leave the state of its checkpoint's optimizer behind."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shardwise.run_dir.resume import KEPT


def outcome(difference: str | None) -> str:
    """A line for the user. `difference`: why this run's optimizer cannot use the saved state; None: it can."""
    if difference is None:
        return KEPT
    return f"the checkpoint's optimizer: {difference}; that state is left behind, and this run's learning rate holds"


def moved_on(configs: Sequence[LRSchedulerConfig], saved: Sequence[Any]) -> list[Any]:
    """Move this run's schedules on by as many steps as the `saved` ones had made, and return their states.

    So each group of this run's optimizer has the rate of that step. The saved states cannot be used: they hold the
    rates of another optimizer, one for each of its groups. A schedule that follows a metric, or that is not torch's,
    begins anew.
    """
    for config, state in zip(configs, saved, strict=False):
        scheduler = config.scheduler
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            continue
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # before the optimizer's first
            for _ in range(_steps(state)):
                scheduler.step()
    return [config.scheduler.state_dict() for config in configs]


def _steps(state: dict[str, Any]) -> int:
    """How many steps a schedule had made; a ChainedScheduler does not know it itself."""
    if "last_epoch" in state:
        return int(state["last_epoch"])
    chained = [one for value in state.values() if isinstance(value, list) for one in value if isinstance(one, dict)]
    return max(map(_steps, chained), default=0)
