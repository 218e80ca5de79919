"""The kernels of attention by their words, and which of them ran in this process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

SDPA = "sdpa"  # scaled_dot_product_attention, which chooses a kernel by the tensors
# The kernels of scaled_dot_product_attention by their words in a config
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}

# Which kernel ran, by what it was asked for: the arguments of `note_kernel`
_RAN: dict[tuple[Any, ...], str] = {}


def kernels_that_ran() -> dict[str, list[str]]:
    """The kernels that attention has used in this process, for whole sequences and for documents."""
    found: dict[str, list[str]] = {}
    for (where, *_), kernel in _RAN.items():
        if kernel not in found.setdefault(where, []):
            found[where].append(kernel)
    return found


# What is compiled calls this once, while it is traced.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note_kernel(where: str, kernel: str, asks: bool, *kind: Any) -> str | None:
    """Record the kernel. Where `asks`, torch is asked which one it takes for such tensors.

    Returns:
        Why the kernel cannot run, for an error that code which is being traced cannot raise from here; None: it can.
    """
    key = (where, kernel, *kind)
    if key not in _RAN:
        taken = _torchs_choice(kernel, *kind) if asks else kernel
        if kernel not in (SDPA, taken):
            device, dtype, head_dim, _, is_masked, *_ = kind
            return (
                f"attention={kernel}: torch {torch.__version__} has no such kernel for {dtype} heads of {head_dim}"
                f"{' and a mask' * is_masked} on {device}; use attention=auto"
            )
        _RAN[key] = taken
    return None


def _torchs_choice(
    kernel: str,
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    shares: bool,
    is_masked: bool,
    needs_gradient: bool,
    causal: bool,
) -> str:
    """The kernel that scaled_dot_product_attention takes for such tensors: `kernel`, or where it cannot, math."""
    if device == "meta" or not hasattr(torch, "_fused_sdp_choice"):
        return kernel
    k = torch.empty(1, 1, 2, head_dim, device=device, dtype=dtype)
    q = torch.empty(1, 2 if shares else 1, 2, head_dim, device=device, dtype=dtype).requires_grad_(needs_gradient)
    mask = torch.ones(1, 1, 2, 2, device=device, dtype=torch.bool) if is_masked else None
    only = nullcontext() if kernel == SDPA else sdpa_kernel([BACKENDS[kernel], SDPBackend.MATH], set_priority=True)
    with only:
        taken = torch._fused_sdp_choice(q, k, k, mask, is_causal=causal and not is_masked, enable_gqa=shares)
    return next((word for word, backend in BACKENDS.items() if backend.value == taken), SDPA)
