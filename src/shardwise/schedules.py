"""Learning-rate schedules as pure functions: (step, total_steps) → factor of the peak rate."""

from __future__ import annotations

import math


def warmup_cosine(step: int, total_steps: int, warmup_steps: int, final_factor: float = 0.0) -> float:
    """Linear from 1/warmup_steps to 1, then half a cosine down to `final_factor` at the last step."""
    _check(warmup_steps, final_factor)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps)
    return final_factor + (1 - final_factor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def warmup_linear(step: int, total_steps: int, warmup_steps: int, final_factor: float = 0.0) -> float:
    """Linear from 1/warmup_steps to 1, then linear down to `final_factor` at the last step."""
    _check(warmup_steps, final_factor)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps)
    return 1 - (1 - final_factor) * min(1.0, progress)


def _check(warmup_steps: int, final_factor: float) -> None:
    if warmup_steps < 0:
        raise ValueError(f"{warmup_steps=} must be at least 0")
    if not 0 <= final_factor <= 1:
        raise ValueError(f"{final_factor=} must be between 0 and 1")
