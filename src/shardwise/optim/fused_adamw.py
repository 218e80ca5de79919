"""AdamW's step over all weights of a large model in one kernel, in place of the kernel that torch's fused AdamW has.

torch's takes up to 320 pieces of 65,536 elements at a time, one launch behind the other, and writes gradients that it
divides by the clipping. It moves memory at three quarters of the speed that a copy has. This one is launched once, and
writes gradients only where clipping changes them. It computes the same, up to the rounding of fp32.
"""

from __future__ import annotations

import functools
import math
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.accelerator import current_device, records_graph

LEAST = 2**29  # elements, below which the kernel gains less than the host takes longer to launch it
CHUNK = 1024  # elements that one program of the kernel has
WARPS = 4


@functools.cache
def use_one_kernel() -> None:
    """Let torch's fused AdamW step large models of fp32 weights with the kernel below, where Triton is installed."""
    if find_spec("triton") is None:
        return
    plain: Any = torch._fused_adamw_

    def fused_adamw_(params: list[Tensor], grads: list[Tensor], first: list[Tensor], second: list[Tensor],
                     largest: list[Tensor], steps: list[Tensor], **options: Any) -> None:  # fmt: skip
        if not largest and takes_all([params, grads, first, second], options):
            step_at_once(params, grads, first, second, steps, **options)
        else:
            plain(params, grads, first, second, largest, steps, **options)

    torch._fused_adamw_ = fused_adamw_  # type: ignore[assignment]


def takes_all(tensors: list[list[Tensor]], options: dict[str, Any]) -> bool:
    """Whether the kernel can have this step. `tensors`: weights, gradients, and both moments."""
    return (
        sum(p.numel() for p in tensors[0]) >= LEAST
        and not options["amsgrad"]
        and not options["maximize"]
        and not isinstance(options["lr"], Tensor)
        and tensors[0][0].device == current_device()  # where Triton launches; torch calls this for each device
        and all(is_plain(t) for kind in tensors for t in kind)
        and not torch.compiler.is_compiling()  # torch has its own way to compile an optimizer
        and not records_graph()  # it would keep the addresses
    )


def is_plain(tensor: Tensor) -> bool:
    """Whether the kernel may go through the tensor's memory from its first element to its last."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.is_cuda
        and tensor.dtype == torch.float32
        and tensor.is_contiguous()
    )


def step_at_once(
    params: list[Tensor], grads: list[Tensor], first: list[Tensor], second: list[Tensor], steps: list[Tensor], *,
    lr: float, beta1: float, beta2: float, weight_decay: float, eps: float,
    grad_scale: Tensor | None = None, found_inf: Tensor | None = None, **_: Any,
) -> None:  # fmt: skip
    """As `torch._fused_adamw_`. `steps`: of each weight, with this one counted."""
    from shardwise.optim.fused_adamw_kernel import adamw

    device = params[0].device
    pointers = [tensor.data_ptr() for kind in (params, grads, first, second) for tensor in kind]
    sizes = tuple(p.numel() for p in params)
    addresses = torch.tensor(pointers, dtype=torch.int64, pin_memory=device.type == "cuda")
    addresses = addresses.to(device, non_blocking=True)
    chunks, lengths = _chunks(sizes, device)
    counted = torch.stack(steps).double()
    seen = [-torch.expm1(counted * (math.log(beta) if beta else -math.inf)) for beta in (beta1, beta2)]
    rates, roots = (lr / seen[0]).float(), seen[1].sqrt().float()
    nothing = torch.zeros((), device=device) if found_inf is None else found_inf
    divisor = torch.ones((), device=device) if grad_scale is None else grad_scale
    adamw[(len(chunks) // 2,)](
        addresses, chunks, lengths, rates, roots, nothing, divisor, len(params), 1 - lr * weight_decay, beta1,
        1 - beta1, beta2, 1 - beta2, eps, CHUNK=CHUNK, ALIGNED=all(p % 16 == 0 for p in pointers),
        num_warps=WARPS,
    )  # fmt: skip
    torch.autograd.graph.increment_version([*params, *first, *second])  # as torch's own do


@functools.lru_cache(maxsize=4)
def _chunks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """For each program which weight it has a part of, and which part; and the weights' sizes."""
    counts = torch.tensor([-(-size // CHUNK) for size in sizes])
    which = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    part = torch.arange(len(which)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    chunks = torch.stack([which, part], dim=1).flatten().to(device, torch.int32)
    return chunks, torch.tensor(sizes, dtype=torch.int64, device=device)
