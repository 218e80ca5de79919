"""The loss: the one place that turns hidden states into logits."""

import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *, reduction: str = "sum") -> Tensor:
    """Nats, fp32: `hidden` [..., D] against the head's `weight` [V, D]; `targets` [...] of -100 do not count."""
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction=reduction)
