"""The counters of Lightning's training loop."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer


def uncount_step(trainer: Trainer) -> None:
    """A step that changed nothing is none: Lightning, which counts it in a moment, is one behind from here."""
    counters = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
    counters.total.completed -= 1
    counters.current.completed -= 1


def rewind(trainer: Trainer, steps: int, batches: int) -> bool:
    """Take the last `steps` back, which took `batches`. Not beyond the begin of an epoch: then nothing changes.

    Returns:
        Whether they are taken back.
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
    """In the loops' saved state: Lightning's counters count micro-batches, of which a step had `before` and has `now`
    another number."""
    if before == now:
        return
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    for counters in (progress["total"], progress["current"]):
        ready = counters["ready"]
        for key, count in counters.items():  # a save comes before the last micro-batch of its window is completed
            counters[key] = ready // before * now - (ready - count)
