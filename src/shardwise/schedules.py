"""Learning-rate schedules as pure functions: (step, total_steps) → factor of the peak rate."""

from __future__ import annotations

import math


def warmup_cosine(
    step: int,
    total_steps: int,
    warmup_steps: int | None = None,
    final_factor: float = 0.0,
    warmup_ratio: float | None = None,
) -> float:
    """Linear from 1/warmup_steps to 1, then half a cosine down to `final_factor` at the last step."""
    warmup = _warmup(total_steps, warmup_steps, final_factor, warmup_ratio)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - 1 - warmup)
    return final_factor + (1 - final_factor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def warmup_linear(
    step: int,
    total_steps: int,
    warmup_steps: int | None = None,
    final_factor: float = 0.0,
    warmup_ratio: float | None = None,
) -> float:
    """Linear from 1/warmup_steps to 1, then linear down to `final_factor` at the last step."""
    warmup = _warmup(total_steps, warmup_steps, final_factor, warmup_ratio)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - 1 - warmup)
    return 1 - (1 - final_factor) * min(1.0, progress)


def _warmup(total_steps: int, warmup_steps: int | None, final_factor: float, warmup_ratio: float | None) -> int:
    """The steps of the warm-up; `warmup_ratio` is their share of all steps, as in Hugging Face's Trainer."""
    if not 0 <= final_factor <= 1:
        raise ValueError(f"{final_factor=} must be between 0 and 1")
    if warmup_steps is not None:
        if warmup_steps < 0:
            raise ValueError(f"{warmup_steps=} must be at least 0")
        return warmup_steps
    if warmup_ratio is None:
        raise ValueError("no warm-up is given: schedule.warmup_steps=N, 0 for none, or schedule.warmup_ratio=0.05")
    if not 0 <= warmup_ratio <= 1:
        raise ValueError(f"{warmup_ratio=} must be between 0 and 1")
    return math.ceil(warmup_ratio * total_steps)
