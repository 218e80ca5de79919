"""AdamW that keeps its moments in 8 bits or in bfloat16. It computes as torch's AdamW does, in fp32 or better.

torchao has an AdamW with 8-bit states, too. It cuts blocks from what a rank holds, so that another strategy or number
of ranks gives other blocks, and its state is a tensor subclass, of which a checkpoint that is read without running code
can hold nothing. Here codes and scales are plain tensors, and blocks lie within rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.optim.by_groups import StepsByGroups, found_inf_of
from shardwise.optim.quantization import dequantize, quantize, table
from shardwise.plan.optimizer_bytes import block_length

_SCALES = ("exp_avg_scale", "exp_avg_sq_root_scale")


class _CompactAdamW(StepsByGroups):
    """The parts that both have in common. The state of a parameter lies on its device, the count of steps too.

    A step leaves everything as it was where `found_inf` is not 0: the device decides, and the host does not wait.
    """

    reads_found_inf = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        if not lr >= 0:
            raise ValueError(f"Invalid learning rate: {lr}")
        self._check_betas(betas)
        if not (eps >= 0 and weight_decay >= 0):
            raise ValueError(f"eps={eps} weight_decay={weight_decay}: neither may be below 0")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                                  "capturable": True})  # fmt: skip

    def _check_betas(self, betas: tuple[float, float]) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={list(betas)}: each must be at least 0 and below 1")

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], *numbers: Any) -> None:
        raise NotImplementedError

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        device = parameters[0].device
        found = found_inf_of(self)
        found = torch.zeros((), dtype=torch.float32, device=device) if found is None else found
        # A list of the same, since the host would read a single tensor here.
        torch._foreach_add_([self.state[p]["step"] for p in parameters], [1 - found] * len(parameters))
        # As tensors, so that a new rate does not compile the step anew; filled, since a copy would wait for the device.
        lr, decay = (torch.full((), float(group[key]), dtype=torch.float64, device=device)
                     for key in ("lr", "weight_decay"))  # fmt: skip
        for p in parameters:
            if not p.numel():
                continue  # a rank may hold no row
            state = self.state[p]
            self._update(p.detach(), p.grad, state, state["step"], found, lr, decay, *group["betas"], group["eps"])  # type: ignore[arg-type]


class AdamWBf16(_CompactAdamW):
    """AdamW whose moments are kept in bfloat16: 4 bytes a parameter in place of 8."""

    is_elementwise = True

    def _check_betas(self, betas: tuple[float, float]) -> None:
        super()._check_betas(betas)
        if len(betas) == 2 and betas[1] > 1 - 2**-8:
            raise ValueError(
                f"betas={list(betas)}: a second moment in bfloat16, which has 8 bits, could never fall by the share "
                f"1 - {betas[1]}; use at most 0.996, or optimizer=adamw_8bit or adamw"
            )

    def make_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return _plain_state(parameter, torch.bfloat16)

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], *numbers: Any) -> None:
        _update_plain(parameter, gradient, state, *numbers)


class AdamW8bit(_CompactAdamW):
    """AdamW whose moments are kept in 8 bits, with a scale for each block: 2 bytes a parameter in place of 8.

    The second moment is kept as its square root, which spans half as many decades. Vectors, and matrices whose rows
    cannot be cut into blocks, have moments in fp32. A row of an embedding shares no scale with other rows.
    """

    is_rowwise = True
    kept_by_rows = _SCALES

    def make_state(self, parameter: Tensor) -> dict[str, Tensor]:
        length = block_length(parameter.shape)
        if length is None:
            return _plain_state(parameter, _compute_dtype(parameter))
        rows, device = parameter.shape[0], parameter.device
        codes = {
            key: torch.zeros(parameter.shape, dtype=torch.uint8, device=device)
            for key in ("exp_avg", "exp_avg_sq_root")
        }
        blocks = math.prod(parameter.shape[1:]) // length
        scales = {key: torch.zeros(rows, blocks, dtype=torch.float32, device=device) for key in _SCALES}
        return {"step": torch.zeros((), dtype=torch.float32, device=device), **codes, **scales}

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], *numbers: Any) -> None:
        length = block_length(parameter.shape)
        if length is None:
            _update_plain(parameter, gradient, state, *numbers)
            return
        whole = parameter.contiguous()  # a block is a row's elements in their order, whatever the layout is
        blocks = [t.contiguous().view(-1, length) for t in (whole, gradient)]
        for codes, scale in (("exp_avg", "exp_avg_scale"), ("exp_avg_sq_root", "exp_avg_sq_root_scale")):
            blocks += [state[codes].view(-1, length), state[scale].view(-1)]
        tables = [table(signed, parameter.device) for signed in (True, False)]
        _run(_update_8bit, *blocks, *tables, *numbers)
        if whole.data_ptr() != parameter.data_ptr():
            parameter.copy_(whole)


def _update_plain(parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], *numbers: Any) -> None:
    tensors = [parameter, gradient, state["exp_avg"], state["exp_avg_sq"]]
    if all(t.is_contiguous() for t in tensors):
        tensors = [t.view(-1) for t in tensors]  # so that parameters with more dimensions do not compile it anew
    _run(_update, *tensors, *numbers)


def _run(function: Callable[..., None], *arguments: Any) -> None:
    """Call `function`, on CUDA compiled: else the result of each of its operations would go through memory."""
    (_compiled(function) if arguments[0].device.type == "cuda" else function)(*arguments)


@functools.cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    return torch.compile(function)


def _plain_state(parameter: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    moments = {key: torch.zeros_like(parameter, dtype=dtype) for key in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **moments}


def _compute_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _update(p: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *numbers: Any) -> None:
    dtype, found = _compute_dtype(p), numbers[1]
    new, first, second = _adamw(p.to(dtype), gradient.to(dtype), exp_avg.to(dtype), exp_avg_sq.to(dtype), *numbers)
    _write([p, exp_avg, exp_avg_sq], [new, first, second], found)


def _update_8bit(
    p: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_scale: Tensor, root: Tensor, root_scale: Tensor,
    signed: Tensor, unsigned: Tensor, *numbers: Any,
) -> None:  # fmt: skip
    """All in blocks: [N, length], and the scales [N]."""
    dtype, found = _compute_dtype(p), numbers[1]
    first = dequantize(exp_avg, exp_avg_scale, signed, dtype)
    second = dequantize(root, root_scale, unsigned, dtype).square()
    new, first, second = _adamw(p.to(dtype), gradient.to(dtype), first, second, *numbers)
    kept = [*quantize(first, signed=True), *quantize(second.sqrt(), signed=False)]
    _write([p, exp_avg, exp_avg_scale, root, root_scale], [new, *kept], found)


def _adamw(
    p: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, found: Tensor, lr: Tensor, decay: Tensor,
    beta1: float, beta2: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The parameter and its moments after a step, as torch.optim.AdamW computes them."""
    first = first.lerp(gradient, 1 - beta1)
    second = second * beta2 + gradient.square() * (1 - beta2)
    correction1, correction2 = (_share_seen(beta, step.to(p.dtype)) for beta in (beta1, beta2))
    move = (first / correction1) / ((second / correction2).sqrt() + eps)
    return p * (1 - lr * decay).to(p.dtype) - lr.to(p.dtype) * move, first, second


def _share_seen(beta: float, step: Tensor) -> Tensor:
    """1 - beta ** step, without the loss of digits that the difference has for a beta near 1."""
    return -torch.expm1(step * (math.log(beta) if beta else -math.inf))


def _write(kept: list[Tensor], new: list[Tensor], found: Tensor) -> None:
    for target, value in zip(kept, new, strict=True):
        target.copy_(torch.where(found > 0, target, value))
