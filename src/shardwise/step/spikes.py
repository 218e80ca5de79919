"""Whether a loss leaps: its robust z-score among the losses before it."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

SPIKE_WINDOW, SPIKE_MINIMUM = 128, 32  # losses that the next one is compared with; fewer than that tell nothing


def robust_z_of(loss: float, before: Collection[float]) -> float:
    """`robust_z` on the host, where tensors would cost more than the arithmetic."""
    finite = math.isfinite(sum(before))
    losses = sorted(before if finite else [value if math.isfinite(value) else math.inf for value in before])
    middle = (len(losses) - 1) // 2
    median = losses[middle]
    if math.isinf(median):
        return math.nan
    deviation = sorted([abs(value - median) for value in losses])[middle]
    return (loss - median) / max(1.4826 * deviation, 1e-3 * abs(median), 1e-30)


def robust_z(loss: Tensor, before: Tensor) -> Tensor:
    """How far `loss` lies above the losses `before` it: in standard deviations, estimated from their median absolute
    deviation, which outliers do not move. Losses that are not finite count as above every other."""
    before = before.nan_to_num(nan=torch.inf)
    median = before.median()
    deviation = (before - median).abs().nan_to_num(nan=torch.inf).median()
    # Below a thousandth of the loss nothing is a spike.
    return (loss - median) / (1.4826 * deviation).clamp(min=1e-3 * median.abs())


class SpikeDetector:
    """Judges on the device, before the weights have changed, as the guard judges on the host."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold  # robust standard deviations
        self._before: list[Tensor] = []  # losses of the last steps

    def is_spike(self, loss: Tensor) -> Tensor:
        """Whether `loss`, the mean over all ranks, leaps: a flag on the device. The loss is remembered."""
        before, self._before = self._before, [*self._before[1 - SPIKE_WINDOW :], loss]
        if len(before) < SPIKE_MINIMUM:
            return torch.zeros_like(loss, dtype=torch.bool)
        return loss.isfinite() & (robust_z(loss, torch.stack(before)) > self.threshold)
