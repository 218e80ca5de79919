"""Numbers that have to be exact: what autocast must not reach, and the mean of an evaluation."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

# Where autocast must not reach.


def no_autocast_in_16_bits(weight: Tensor) -> AbstractContextManager[Any]:
    """Autocast off where `weight` is in 16 bits; over fp32 weights it is what makes the layers compute in fewer."""
    is_off = weight.itemsize == 2 and not weight.is_meta
    return torch.autocast(weight.device.type, enabled=False) if is_off else nullcontext()


# The mean of an evaluation, exact whatever the sizes of its batches.


class ExactMean(Metric):
    """The mean over every item (a sample, a token) of every rank, each counted once."""

    total: Tensor
    items: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        # An fp32 sum loses a little of every batch once it has outgrown them.
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("items", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.to(device)

    def update(self, total: Tensor, items: Tensor | int) -> None:
        """Adds the sum over a batch's items, and how many they are."""
        self.total += total
        self.items += items

    def compute(self) -> Tensor:
        """In the unit of the sums that were added: nats, of a loss."""
        return self.total / self.items.clamp(min=1)
