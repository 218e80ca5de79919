"""What the kernels of quack-kernels 0.6.5 do with our arguments, in their order. They themselves run on GPUs alone."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import Tensor, nn


def cross_entropy_fwd_out(
    x: Tensor,
    target: Tensor,
    target_logit: None,
    loss: Tensor,
    lse: Tensor | None,
    dx: Tensor | None,
    weight: None,
    ignore: int,
) -> None:
    assert target_logit is weight is None and loss.dtype == torch.float32 and ignore == -100
    with torch.enable_grad():
        logits = x.float().requires_grad_()
        each = nn.functional.cross_entropy(logits, target, ignore_index=ignore, reduction="none")
    loss.copy_(each.detach())
    if lse is not None:
        assert lse.dtype == torch.float32
        lse.copy_(logits.detach().logsumexp(1))
    if dx is not None:
        assert dx is x
        dx.copy_(torch.autograd.grad(each.sum(), logits)[0])


def cross_entropy_bwd_out(
    x: Tensor, target: Tensor, dloss: Tensor, lse: Tensor, dx: Tensor, weight: None, ignore: int
) -> None:
    """A target that is no column takes nothing away."""
    assert dx is x and weight is None and ignore == -100 and dloss.dtype == lse.dtype == torch.float32
    powers = (x.float() - lse.unsqueeze(1)).exp() - (torch.arange(x.shape[1]) == target.unsqueeze(1)).float()
    dx.copy_(torch.where((target != ignore).unsqueeze(1), powers * dloss.unsqueeze(1), 0.0))


def replace_kernels(patch: pytest.MonkeyPatch) -> None:
    functions = {f.__name__: f for f in (cross_entropy_fwd_out, cross_entropy_bwd_out)}
    patch.setitem(sys.modules, "quack.cross_entropy", types.SimpleNamespace(**functions))
