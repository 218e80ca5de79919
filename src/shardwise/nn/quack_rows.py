"""Losses of rows of logits, and gradients written over the logits, by kernels of quack-kernels on NVIDIA GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.nn.vocabulary_part import VocabularyPart

IGNORE = -100  # a target that does not count, as torch's cross_entropy has it
NOT_HERE = -1  # the kernel's target of a row whose token another rank has: it is no column


def fused_rows(logits: Tensor, targets: Tensor, losses: Tensor, with_gradients: bool) -> None:
    """One kernel: it reads the logits once, and writes gradients over them in their own dtype."""
    forward, _ = _kernels()
    forward(logits, targets, None, losses, None, logits if with_gradients else None, None, IGNORE)


def fused_rows_of_a_part(
    logits: Tensor, targets: Tensor, losses: Tensor, with_gradients: bool, part: VocabularyPart
) -> None:
    """The same where each rank has the logits of its own tokens: [N, its tokens].

    One kernel finds the logarithm of the summed powers of each row, ranks exchange it and the target's logit, and one
    more kernel writes the gradients: three passes over the logits in place of two.
    """
    forward, backward = _kernels()
    counts, (mine, own) = targets != IGNORE, part.own(targets)
    log_sums = torch.empty_like(losses)
    forward(logits, own, None, losses, log_sums, None, None, IGNORE)
    at_target = torch.where(mine, logits.gather(1, own.unsqueeze(1)).squeeze(1).to(losses.dtype), 0.0)
    found = part.peers.gather_copies(torch.stack((log_sums, at_target)))
    log_sums = found[:, 0].logsumexp(0)
    losses.copy_(torch.where(counts, log_sums - found[:, 1].sum(0), 0.0))
    if with_gradients:
        columns = torch.where(mine, own, torch.where(counts, NOT_HERE, IGNORE))
        backward(logits, columns, torch.ones_like(losses), log_sums, logits, None, IGNORE)


@functools.cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        from quack.cross_entropy import cross_entropy_bwd_out, cross_entropy_fwd_out
    except (ImportError, RuntimeError, OSError) as error:  # of CUDA's libraries as well
        raise ConfigError(
            f"loss=fused needs quack-kernels, which cannot be used here ({type(error).__name__}: {error}): "
            f"pip install -e '.[kernels]', or use loss=chunked"
        ) from error
    return cross_entropy_fwd_out, cross_entropy_bwd_out
