"""Attention kernels that torch.compile sees whole: torch's flex_attention with block masks, and FlashAttention 4."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

# torch's flex_attention, whose masks say which blocks of positions have nothing to compute.


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


# FlashAttention 4 as an operator of torch, so that a compiled graph holds it and checkpointing can name it.
#
# The package `flash-attn-4` has functions for CUDA tensors that torch's compiler cannot look into. torch has a hook of
# its own for them (`torch.nn.attention.activate_flash_attention_impl`), which expects two results of their forward: the
# version that the extra `kernels` pins returns five. The CPU has no kernel: tests register one.

OPERATOR = "shardwise::flash_attention_4"


@torch.library.custom_op(OPERATOR, mutates_args=(), device_types="cuda")
def flash_attention_4(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, longest: int) -> tuple[Tensor, Tensor]:
    """Causal attention, in 16 bits, with a backward pass.

    `q`: contiguous [B, T, heads, head_dim]; `k` and `v`: the same, or with fewer heads, each of which several queries
    share. With `starts`, int32 [documents + 1], they are [tokens, heads, head_dim], and a position sees its own
    document alone, which has at most `longest` tokens.

    Returns:
        The output, in the shape and dtype of `q`, and the log of each row's sum of exponentials: fp32 [B, heads, T], or
        [heads, tokens].
    """
    out, lse, *_ = _interface()._flash_attn_fwd(q, k, v, causal=True, return_lse=True, **_documents(starts, longest))
    return out, lse


@flash_attention_4.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, longest: int) -> tuple[Tensor, Tensor]:
    *batch, tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((*batch, heads, tokens), dtype=torch.float32)


@torch.library.custom_op(f"{OPERATOR}_backward", mutates_args=(), device_types="cuda")
def flash_attention_4_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, gradient: Tensor, lse: Tensor, starts: Tensor | None, longest: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `q`, `k` and `v`. `deterministic`: the same bits each time, at some cost."""
    more = {"causal": True, "deterministic": deterministic, **_documents(starts, longest)}
    dq, dk, dv = _interface()._flash_attn_bwd(q, k, v, out, gradient, lse, **more)
    return dq, dk, dv


@flash_attention_4_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, gradient: Tensor, lse: Tensor, starts: Tensor | None, longest: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@cache
def _interface() -> Any:
    # It says this of an argument that is not used, whenever it compiles a kernel.
    warnings.filterwarnings("ignore", "Argument aux_data .* cannot be converted to a JitArgument")
    from flash_attn.cute import interface

    return interface


def _documents(starts: Tensor | None, longest: int) -> dict[str, Any]:
    if starts is None:
        return {}
    return {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts, longest = inputs
    ctx.save_for_backward(q, k, v, *output, starts)
    ctx.longest = longest


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    q, k, v, out, lse, starts = ctx.saved_tensors
    deterministic = torch.are_deterministic_algorithms_enabled()
    gradients = flash_attention_4_backward(q, k, v, out, gradient, lse, starts, ctx.longest, deterministic)
    return (*gradients, None, None)


flash_attention_4.register_autograd(_differentiate, setup_context=_save)
