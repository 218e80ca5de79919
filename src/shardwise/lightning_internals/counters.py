"""The counters of Lightning's training loop."""

from __future__ import annotations

from typing import Any


def _in_micro_batches(loops: dict[str, Any], before: int, now: int) -> None:
    """Lightning's counters count micro-batches, and a step may have another number of them now."""
    if before == now:
        return
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    for counters in (progress["total"], progress["current"]):
        ready = counters["ready"]
        for key, count in counters.items():  # a save comes before the last micro-batch of its window is completed
            counters[key] = ready // before * now - (ready - count)
