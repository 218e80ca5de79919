"""The loss, which alone turns hidden states into logits."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *, reduction: str = "sum") -> Tensor:
    """The loss in nats, in fp32 or better, of `hidden` [..., D], the head's `weight` [V, D] and `targets` [...].

    Targets of -100 do not count.
    """
    logits = F.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction=reduction)
