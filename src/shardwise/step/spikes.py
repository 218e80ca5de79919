"""Finds spikes of the loss, by its robust z-score among the losses before it."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

# A loss is compared with up to SPIKE_WINDOW losses before it, and not before there are SPIKE_MINIMUM of them.
SPIKE_WINDOW, SPIKE_MINIMUM = 128, 32


def robust_z_of(loss: float, before: Collection[float]) -> float:
    """Compute `robust_z` on the host, where tensors would take longer than the arithmetic."""
    finite = math.isfinite(sum(before))
    losses = sorted(before if finite else [value if math.isfinite(value) else math.inf for value in before])
    middle = (len(losses) - 1) // 2
    median = losses[middle]
    if math.isinf(median):
        return math.nan
    deviation = sorted([abs(value - median) for value in losses])[middle]
    return (loss - median) / max(1.4826 * deviation, 1e-3 * abs(median), 1e-30)


def robust_z(loss: Tensor, before: Tensor) -> Tensor:
    """How many standard deviations `loss` lies above the median of the losses `before` it.

    The standard deviation is estimated from the median absolute deviation, which outliers do not move. A loss that is
    not finite counts as larger than every other.
    """
    before = before.nan_to_num(nan=torch.inf)
    median = before.median()
    deviation = (before - median).abs().nan_to_num(nan=torch.inf).median()
    # The deviation is at least a thousandth of the loss, so that a tiny change is no spike.
    return (loss - median) / (1.4826 * deviation).clamp(min=1e-3 * median.abs())


class SpikeDetector:
    """Finds spikes on the device before the weights change, by the rule that the guard has on the host."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold  # robust standard deviations
        self._before: list[Tensor] = []  # the losses of the last steps

    def is_spike(self, loss: Tensor) -> Tensor:
        """Whether `loss`, the mean over all ranks, is a spike: a flag on the device. Remembers the loss."""
        before, self._before = self._before, [*self._before[1 - SPIKE_WINDOW :], loss]
        if len(before) < SPIKE_MINIMUM:
            return torch.zeros_like(loss, dtype=torch.bool)
        return loss.isfinite() & (robust_z(loss, torch.stack(before)) > self.threshold)
