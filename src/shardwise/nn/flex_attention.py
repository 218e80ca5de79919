"""torch's flex_attention, whose masks say which blocks of positions have nothing to compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def document_block_mask(number: Tensor) -> Any:
    """`number`: int64 [B, T], of each token's document."""
    from torch.nn.attention.flex_attention import create_block_mask  # it takes long to import

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (number[b, q] == number[b, k])

    batch, length = number.shape
    return create_block_mask(visible, batch, None, length, length, device=number.device)


def causal_block_mask(length: int, device: torch.device) -> Any:
    """That of whole sequences."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    return create_block_mask(visible, None, None, length, length, device=device)


kept_block_mask = cache(causal_block_mask)


def flex_attention(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, shares: bool) -> Tensor:
    """[B, heads, T, head_dim], compiled. `shares`: `k` and `v` have fewer heads than `q`."""
    from torch.nn.attention.flex_attention import flex_attention as plain

    attend: Any = plain if torch.compiler.is_compiling() else _compiled(plain)
    out: Tensor = attend(q, k, v, block_mask=block_mask, enable_gqa=shares)
    return out


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """flex_attention that is not compiled holds a number for every pair of positions."""
    return torch.compile(function)
