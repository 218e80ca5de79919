"""Causal attention, over whole sequences or inside each document of a packed sequence."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    from torch.nn.attention import varlen

    varlen_attn: Callable[..., Any] | None = varlen.varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None

# Its parameters differ between torch's versions. They are read here, since code that is compiled cannot ask.
_PARAMETERS = inspect.signature(varlen_attn).parameters if varlen_attn is not None else {}
_CAUSAL: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in _PARAMETERS else {"is_causal": True}
_NAMES_SHARED_HEADS = "enable_gqa" in _PARAMETERS

# What attention needs to know of the documents in a batch, made once for all layers. It is a plain dict of integer and
# boolean tensors, since strategies cast the floating-point inputs of a layer and hand on all others as they are.
Layout = dict[str, Tensor]


def document_starts(documents: Tensor) -> Tensor:
    """Where each document begins among the tokens of a batch, and after them the number of tokens.

    `documents`: [B, T], a number that changes where another document begins. A sequence begins a document, too.

    Returns:
        int32 [number of documents + 1]. On a GPU the host waits for their number.
    """
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    return F.pad(starts, (0, 1), value=documents.numel()).to(torch.int32)


def document_layout(documents: Tensor, starts: Tensor | None, dtype: torch.dtype, head_dim: int) -> Layout:
    """What `causal_attention` needs to stay inside documents, on the device of `documents` [B, T].

    `starts`: `document_starts(documents)`, where the data has made it already. `dtype`: that of queries and keys. In
    16 bits on a GPU a kernel reads `starts`; elsewhere the layout is a boolean mask.

    Returns:
        `positions`: int64 [B, T], from 0 on in each document. And `starts`, or `mask`: bool [B, 1, T, T].
    """
    length = documents.shape[1]
    index = torch.arange(length, device=documents.device)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    positions = index - torch.where(begins, index, 0).cummax(dim=1).values
    if runs_varlen(documents, dtype, head_dim):
        return {"positions": positions, "starts": document_starts(documents) if starts is None else starts}
    number = begins.cumsum(dim=1)
    same = number[:, :, None] == number[:, None, :]
    return {"positions": positions, "mask": (same & (index[:, None] >= index)).unsqueeze(1)}


def causal_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout | None = None) -> Tensor:
    """Attention in which a position looks at itself and what is before it; with `layout` only in its own document.

    `q`: [B, heads, T, head_dim]; `k` and `v`: the same, or with fewer heads, each of which several queries share.

    Returns:
        The shape and dtype of `q`.
    """
    shares = q.shape[1] != k.shape[1]
    if layout is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shares)
    if "mask" in layout:
        if shares and q.is_cuda and q.shape[2] == k.shape[2]:
            # With a mask and shared heads torch would hold a number for every pair of positions, heads times.
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            shares = False
        return F.scaled_dot_product_attention(q, k, v, attn_mask=layout["mask"], enable_gqa=shares)
    return _varlen(q, k, v, layout["starts"], shares)


def runs_varlen(documents: Tensor, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's variable-length attention takes such heads on this device. It is FlashAttention, in 16 bits."""
    in_16_bits = dtype in (torch.bfloat16, torch.float16)
    return varlen_attn is not None and documents.is_cuda and in_16_bits and head_dim % 8 == 0 and head_dim <= 256


def _varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, shares: bool) -> Tensor:
    """Attention over documents of any length, which lie one after the other: [B, H, T, D] is read as [B * T, H, D]."""
    batch, _, length, _ = q.shape
    flat = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    more = {"enable_gqa": shares} if _NAMES_SHARED_HEADS else {}
    # A document is at most as long as its sequence. Its exact length would have to come from the device.
    assert varlen_attn is not None
    out = varlen_attn(*flat, starts, starts, length, length, **_CAUSAL, **more)
    joined: Tensor = out.unflatten(0, (batch, length)).transpose(1, 2)
    return joined
