"""Causal attention, over whole sequences or inside each document of a packed sequence, by the kernel that is asked for.

plan/kernel_choice.py decides which; docs/large-models.md says how to choose.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.errors import ConfigError
from shardwise.nn.attention_kernels import (
    causal_block_mask,
    document_block_mask,
    flash_attention_4,
    flex_attention,
    kept_block_mask,
)

try:
    from torch.nn.attention import varlen

    varlen_attn: Callable[..., Any] | None = varlen.varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None

# Its parameters differ between torch's versions. They are read here, since code that is compiled cannot ask.
_PARAMETERS = inspect.signature(varlen_attn).parameters if varlen_attn is not None else {}
_CAUSAL: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in _PARAMETERS else {"is_causal": True}
_NAMES_SHARED_HEADS = "enable_gqa" in _PARAMETERS

SDPA = "sdpa"  # scaled_dot_product_attention, which chooses a kernel by the tensors
# The kernels of scaled_dot_product_attention by their words in a config
_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# With a mask cuDNN gives gradients that are not numbers for some lengths (pytorch issue 196678), and on Blackwell GPUs
# it continues texts wrongly (193893).
_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# What attention needs to know of the documents in a batch, made once for all layers. It is a plain dict, mostly of
# integer and boolean tensors, since strategies cast the floating-point inputs of a layer and hand on all others.
Layout = dict[str, Any]


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


def document_layout(
    documents: Tensor, starts: Tensor | None, dtype: torch.dtype, head_dim: int, kernel: str = SDPA
) -> Layout:
    """What `causal_attention` with this `kernel` needs to stay inside documents, on the device of `documents` [B, T].

    `starts`: `document_starts(documents)`, where the data has made it already. `dtype`: that of queries and keys. In
    16 bits on a GPU a kernel reads `starts`; elsewhere the layout is a boolean mask.

    Returns:
        `positions`: int64 [B, T], from 0 on in each document. And `starts`, or `mask`: bool [B, 1, T, T], or
        `block_mask`: flex_attention's. Under context parallelism the positions are those of this rank's part of each
        sequence; `documents` is given whole.

    Raises:
        ConfigError: the kernel cannot keep documents apart.
    """
    length = documents.shape[1]
    index = torch.arange(length, device=documents.device)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    positions = index - torch.where(begins, index, 0).cummax(dim=1).values
    number, parts = begins.cumsum(dim=1), sequence_parts()
    layout = {"positions": positions} if parts is None else parts.layout(positions, number, makes_masks=True)
    if "masks" in layout:
        if kernel in ("cudnn", "flex", "fa4") or (kernel == "flash" and documents.is_cuda):
            raise ConfigError(
                f"attention={kernel}: the batch has documents to keep apart, which needs a mask with "
                f"strategy.context_parallel_method=keys, and this kernel takes none; use attention=efficient"
            )
        return layout
    if kernel == "flex":
        return layout | {"block_mask": document_block_mask(number)}
    if kernel == "fa4" or (kernel in (SDPA, "flash") and runs_varlen(documents, dtype, head_dim)):
        return layout | {"starts": document_starts(documents) if starts is None else starts}
    if kernel == "cudnn" or (kernel == "flash" and documents.is_cuda):
        raise ConfigError(
            f"attention={kernel}: the batch has documents to keep apart, which this kernel cannot do for heads of "
            f"{head_dim} in {dtype}; use attention=auto"
        )
    same = number[:, :, None] == number[:, None, :]
    return layout | {"mask": (same & (index[:, None] >= index)).unsqueeze(1)}


def whole_layout(tokens: Tensor, dtype: torch.dtype, head_dim: int, kernel: str = SDPA) -> Layout | None:
    """What `causal_attention` with this `kernel` needs for sequences without documents; most kernels need nothing.

    `tokens`: [B, T]. Under context parallelism these are a part of each sequence, and `positions`, int64 [T], says
    where in it they are. `dtype`: that of queries and keys.
    """
    parts, length = sequence_parts(), tokens.shape[1]
    layout: Layout = {}
    if parts is not None:
        length *= parts.ranks
        positions = torch.arange(length, device=tokens.device)
        layout = parts.layout(positions, None, makes_masks=not takes_later_queries(tokens, dtype, head_dim, kernel))
    if kernel == "flex":
        make = causal_block_mask if torch.compiler.is_compiling() else kept_block_mask
        layout["block_mask"] = make(length, tokens.device)
    return layout or None


def causal_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout | None = None, kernel: str = SDPA) -> Tensor:
    """Attention in which a position looks at itself and what is before it; with `layout` only in its own document.

    Under context parallelism T is this rank's part of each sequence; a position also looks at those of other ranks.

    `q`: [B, heads, T, head_dim]; `k` and `v`: the same, or with fewer heads, each of which several queries share.
    `kernel`: cudnn, flash, efficient, math, flex or fa4 runs that one and no other; sdpa leaves the choice to torch.
    `kernels_that_ran` knows which one ran.

    Returns:
        The shape and dtype of `q`.

    Raises:
        ConfigError: the kernel does not take such tensors.
    """
    layout, parts = {} if layout is None else layout, sequence_parts()
    if parts is not None:
        return parts.attend(q, k, v, layout, kernel, _attend)
    return _attend(q, k, v, layout, kernel)


def takes_later_queries(like: Tensor, dtype: torch.dtype, head_dim: int, kernel: str) -> bool:
    """Whether the kernel takes queries of the last positions alone, with all keys, and needs no mask for that.

    `like`: any tensor on the device.
    """
    return kernel == "fa4" or (kernel in (SDPA, "flash") and runs_varlen(like, dtype, head_dim))


def _attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, kernel: str) -> Tensor:
    """`causal_attention` over all positions, or with a mask. With more keys than queries and no mask, the queries are
    those of the last positions: see `takes_later_queries`."""
    shares = q.shape[1] != k.shape[1]
    mask, starts = layout.get("mask"), layout.get("starts")
    is_varlen = kernel in (SDPA, "flash") and (starts is not None or (mask is None and q.shape[2] != k.shape[2]))
    # Only positions in documents differ between sequences.
    where = "documents" if "positions" in layout and layout["positions"].dim() == 2 else "whole sequences"
    if shares and (kernel == "efficient" or (mask is not None and q.is_cuda)):
        # With a mask and shared heads torch would hold a number for every pair of positions, heads times. Its
        # memory-efficient kernel does not know shared heads before torch 2.13.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        shares = False
    needs_gradient = torch.is_grad_enabled() and q.requires_grad
    ran = "flash" if is_varlen else kernel
    asks = ran in (SDPA, *_BACKENDS) and not is_varlen
    against = _note(where, ran, asks, q.device.type, q.dtype, q.shape[3], shares, mask is not None, needs_gradient)
    if against is not None:
        raise ConfigError(against)
    if kernel == "fa4":
        return _flash_attention_4(q, k, v, starts)
    if kernel == "flex":
        return flex_attention(q, k, v, layout["block_mask"], shares)
    if is_varlen:
        return _varlen(q, k, v, starts, shares)
    if kernel == SDPA:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=shares)
    with sdpa_kernel(_BACKENDS[kernel]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=shares)


def cached_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of new tokens to those in a key-value cache. Its kernel is torch's choice.

    `q`: [B, heads, T, head_dim]; `k` and `v`: the same, or with fewer heads, over all tokens so far. `mask`: bool
    [B, 1, T, tokens], what each may look at; None: each new one at itself and those before it.
    """
    more: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": q.shape[1] != k.shape[1]}
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, **more)
    with sdpa_kernel(_WITHOUT_CUDNN):
        return F.scaled_dot_product_attention(q, k, v, **more)


# Which kernel ran, by what it was asked for: the arguments of `_note`
_RAN: dict[tuple[Any, ...], str] = {}


def kernels_that_ran() -> dict[str, list[str]]:
    """The kernels that `causal_attention` has used in this process, for whole sequences and for documents."""
    found: dict[str, list[str]] = {}
    for (where, *_), kernel in _RAN.items():
        if kernel not in found.setdefault(where, []):
            found[where].append(kernel)
    return found


# What is compiled calls this once, while it is traced.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note(where: str, kernel: str, asks: bool, *kind: Any) -> str | None:
    """Record the kernel. Where `asks`, torch is asked which one it takes for such tensors.

    Returns:
        Why the kernel cannot run, for an error that code which is being traced cannot raise from here; None: it can.
    """
    key = (where, kernel, *kind)
    if key not in _RAN:
        taken = _torchs_choice(kernel, *kind) if asks else kernel
        if kernel not in (SDPA, taken):
            device, dtype, head_dim, _, is_masked, _ = kind
            return (
                f"attention={kernel}: torch {torch.__version__} has no such kernel for {dtype} heads of {head_dim}"
                f"{' and a mask' * is_masked} on {device}; use attention=auto"
            )
        _RAN[key] = taken
    return None


def _torchs_choice(
    kernel: str, device: str, dtype: torch.dtype, head_dim: int, shares: bool, is_masked: bool, needs_gradient: bool
) -> str:
    """The kernel that scaled_dot_product_attention takes for such tensors: `kernel`, or where it cannot, math."""
    if device == "meta" or not hasattr(torch, "_fused_sdp_choice"):
        return kernel
    k = torch.empty(1, 1, 2, head_dim, device=device, dtype=dtype)
    q = torch.empty(1, 2 if shares else 1, 2, head_dim, device=device, dtype=dtype).requires_grad_(needs_gradient)
    mask = torch.ones(1, 1, 2, 2, device=device, dtype=torch.bool) if is_masked else None
    only = nullcontext() if kernel == SDPA else sdpa_kernel([_BACKENDS[kernel], SDPBackend.MATH], set_priority=True)
    with only:
        taken = torch._fused_sdp_choice(q, k, k, mask, is_causal=not is_masked, enable_gqa=shares)
    return next((word for word, backend in _BACKENDS.items() if backend.value == taken), SDPA)


def runs_varlen(like: Tensor, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's variable-length attention takes such heads on this device. It is FlashAttention, in 16 bits."""
    in_16_bits = dtype in (torch.bfloat16, torch.float16)
    return varlen_attn is not None and like.is_cuda and in_16_bits and head_dim % 8 == 0 and head_dim <= 256


def _varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, shares: bool) -> Tensor:
    """Attention over documents of any length, which lie one after the other: [B, H, T, D] is read as [B * T, H, D].

    Without `starts` each sequence is one. Its last query looks at all of its keys, of which there may be more.
    """
    batch, _, length, _ = q.shape
    keys = k.shape[2]
    flat = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    more = {"enable_gqa": shares} if _NAMES_SHARED_HEADS else {}
    begins = [starts, starts]
    if starts is None:
        sequences = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        begins = [sequences * length, sequences * keys]
    # A document is at most as long as its sequence. Its exact length would have to come from the device.
    assert varlen_attn is not None
    out = varlen_attn(*flat, *begins, length, keys, **_CAUSAL, **more)
    joined: Tensor = out.unflatten(0, (batch, length)).transpose(1, 2)
    return joined


def _flash_attention_4(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None) -> Tensor:
    if q.is_cuda and q.dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            f"attention=fa4: FlashAttention 4 computes in 16 bits, and the queries are {q.dtype}; use attention=auto"
        )
    batch, _, length, _ = q.shape
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    out: Tensor
    if starts is None:
        out, _ = flash_attention_4(q, k, v, None, length)
    else:
        out, _ = flash_attention_4(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), starts, length)
        out = out.view(batch, length, *out.shape[1:])
    return out.transpose(1, 2)


# Sequences of which this rank computes a part: what a model needs to know of it under context parallelism.
#
# Every layer but attention looks at each position by itself. parallel/context_parallel.py puts here how attention
# reaches the positions of other ranks, and `causal_attention` asks for it, so that a model knows no rank.


class SequenceParts(Protocol):
    """How the sequences of the present batch are divided over ranks."""

    ranks: int

    def layout(self, positions: Tensor, documents: Tensor | None, *, makes_masks: bool) -> dict[str, Any]:
        """What attention needs to know of this rank's part.

        `positions`: int64 [T] or [B, T], those of whole sequences; `documents`: int64 [B, T], the number of each
        token's document. `makes_masks`: the kernel needs a mask for queries of the last positions alone.

        Returns:
            `positions`, those of this rank. And `masks`, if it computes these alone and `makes_masks`: what each run of
            them may look at, bool [B or 1, 1, run, keys up to its end].
        """

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layout: dict[str, Any], kernel: str, attention: Callable[..., Tensor]
    ) -> Tensor:
        """Attention of this rank's positions, [B, heads, T, head_dim]. `attention`: that of one rank."""


_parts: SequenceParts | None = None  # of this process's run


def sequence_parts() -> SequenceParts | None:
    """How sequences are divided over ranks; None: every rank computes whole sequences."""
    return _parts


def use_sequence_parts(parts: SequenceParts | None) -> None:
    """Let attention of this process work on parts of sequences from now on; None: on whole ones again."""
    global _parts
    _parts = parts


@contextmanager
def whole_sequences() -> Iterator[None]:
    """Inside, every rank computes whole sequences, such as a text that a hook gives to the model."""
    parts = sequence_parts()
    use_sequence_parts(None)
    try:
        yield
    finally:
        use_sequence_parts(parts)
