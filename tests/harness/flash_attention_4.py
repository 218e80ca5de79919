"""A kernel for the CPU of the operator that FlashAttention 4 stands behind, in plain arithmetic, registered on import.

It shows what is around the kernel: shapes, gradients, documents, graphs and checkpointing. The kernel itself needs a
GPU: benchmarks/gpu_checks/attention.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.nn.attention_kernels import flash_attention_4, flash_attention_4_backward

calls = {"forward": 0, "backward": 0}


def _spread(q: Tensor, x: Tensor) -> Tensor:
    """[B, T, heads, D] → fp64 [B, heads of q, T, D]."""
    return x.double().transpose(-3, -2).repeat_interleave(q.shape[-2] // x.shape[-2], dim=-3)


def _hidden(tokens: int, keys: int, starts: Tensor | None) -> Tensor:
    """Which keys each query must not see: bool [T, keys]. The queries are the last ones."""
    index = torch.arange(keys)
    later = index[keys - tokens :, None] < index
    if starts is None:
        return later
    document = torch.searchsorted(starts.long(), index, right=True)
    return later | (document[:, None] != document)


def _scores(q: Tensor, k: Tensor, starts: Tensor | None) -> Tensor:
    scores = _spread(q, q) @ _spread(q, k).mT / q.shape[-1] ** 0.5
    return scores.masked_fill(_hidden(q.shape[-3], k.shape[-3], starts), -torch.inf)


@flash_attention_4.register_kernel("cpu")
def _(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, longest: int) -> tuple[Tensor, Tensor]:
    calls["forward"] += 1
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    assert starts is None or (starts.dtype == torch.int32 and int(starts.diff().max()) <= longest)
    scores = _scores(q, k, starts)
    out = (scores.softmax(-1) @ _spread(q, v)).transpose(-3, -2)
    return out.to(q.dtype).contiguous(), scores.logsumexp(-1).float()


@flash_attention_4_backward.register_kernel("cpu")
def _(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, gradient: Tensor, lse: Tensor, starts: Tensor | None, longest: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    calls["backward"] += 1
    p = (_scores(q, k, starts) - lse.double()[..., None]).exp()
    d = _spread(q, gradient)
    ds = p * (d @ _spread(q, v).mT - (d * _spread(q, out)).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5

    def gathered(x: Tensor, like: Tensor) -> Tensor:
        """The sum over the queries that share a head."""
        heads = x.unflatten(-3, (like.shape[-2], -1)).sum(-3)
        return heads.transpose(-3, -2).to(like.dtype).contiguous()

    return gathered(ds @ _spread(q, k), q), gathered(ds.mT @ _spread(q, q), k), gathered(p.mT @ d, v)
