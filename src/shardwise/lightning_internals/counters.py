"""Changes the counters of Lightning's training loop."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Trainer


def run_length(trainer: Trainer) -> int | None:
    """The number of the run's steps, alike on every rank; None: the data have no length that is known beforehand.

    Under max_epochs this loads the training data, once.
    """
    known = trainer.max_steps if trainer.max_steps >= 0 else trainer.estimated_stepping_batches
    return int(known) if 0 <= known < math.inf else None


def uncount_step(trainer: Trainer) -> None:
    """Count one step less, before Lightning counts a step that has changed nothing."""
    counters = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
    counters.total.completed -= 1
    counters.current.completed -= 1


def rewind(trainer: Trainer, steps: int, batches: int) -> bool:
    """Set the counters back by `steps` and their `batches`.

    Returns:
        Whether that was done. If the epoch began later than these steps, nothing changes.
    """
    loop = trainer.fit_loop.epoch_loop
    optimizer = loop.automatic_optimization.optim_progress.optimizer
    if batches > loop.batch_progress.current.ready:
        return False
    for progress, count in ((loop.batch_progress, batches), (optimizer.step, steps), (optimizer.zero_grad, steps)):
        for counter in (progress.total, progress.current):
            for name in vars(counter):
                setattr(counter, name, getattr(counter, name) - count)
    return True


def count_in_other_micro_batches(loops: dict[str, Any], before: int, now: int) -> None:
    """Convert the saved counters of micro-batches in `loops`, since a step had `before` of them and has `now`."""
    if before == now:
        return
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    for counters in (progress["total"], progress["current"]):
        ready = counters["ready"]
        for key, count in counters.items():  # at a save the window's last micro-batch is not completed yet
            counters[key] = ready // before * now - (ready - count)
