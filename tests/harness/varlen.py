"""torch's variable-length attention in plain arithmetic, for the CPU (gpu_checks/last_positions.py has the kernel).

It stands in for `varlen_attn` of nn/attention.py, whose arguments it takes, and is traced when a layer is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from shardwise.nn import attention
from shardwise.parallel.context_parallel import ContextParallel

calls = {"more keys": 0}


def varlen_attn(
    q: Tensor, k: Tensor, v: Tensor, begins_q: Tensor, begins_k: Tensor, longest_q: int, longest_k: int, **more: Any
) -> Tensor:
    """[tokens, heads, head_dim]. The last query of a sequence sees all of its keys, as in FlashAttention."""
    calls["more keys"] += longest_k > longest_q
    assert begins_q.dtype == begins_k.dtype == torch.int32
    assert more["window_size"] == (-1, 0) and (more["enable_gqa"] or q.shape[1] == k.shape[1])
    sequences, to_end = [], []
    for x, begins in ((q, begins_q), (k, begins_k)):
        index = torch.arange(len(x))
        sequences.append(torch.searchsorted(begins.long(), index, right=True))
        to_end.append(begins[sequences[-1]] - index)
    seen = (sequences[0][:, None] == sequences[1]) & (to_end[0][:, None] <= to_end[1])
    q, k, v = (x.transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], dim=0) for x in (q, k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    out: Tensor = (scores.softmax(-1) @ v).transpose(0, 1)
    return out


def refuse_mask(*_: Any) -> Any:
    raise AssertionError("a mask was made")


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside, the kernels of 16 bits on a GPU are taken for any tensors, and context parallelism makes no masks."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(attention, "varlen_attn", varlen_attn))
        stack.enter_context(patch.object(attention, "runs_varlen", lambda *_: True))
        stack.enter_context(patch.object(ContextParallel, "_masks", refuse_mask))
        yield
