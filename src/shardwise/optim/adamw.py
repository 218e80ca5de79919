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
from torch.optim import Optimizer

from shardwise.plan.optimizer import block_length

# An optimizer's step, group by group, for optimizers that are written here.


class StepsByGroups(Optimizer):
    """Makes the state of parameters that have a gradient for the first time, and steps each group of parameters."""

    def make_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """What is kept for a parameter before its first step."""
        raise NotImplementedError

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Step the `parameters` of a group, all of which have gradients and state."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for p in parameters:
                if not self.state[p]:
                    self.state[p].update(self.make_state(p))
            if parameters:
                self._step_group(group, parameters)
        return loss


def found_inf_of(optimizer: Optimizer) -> Tensor | None:
    """What torch's fused optimizers read too: a step changes nothing where it is not 0. The guard sets it."""
    found: Tensor | None = getattr(optimizer, "found_inf", None)
    return found


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


# Keeps numbers in 8 bits, each as a share of the largest number in its block.
#
# After Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2021), with their "dynamic" table of 256
# shares, the one that bitsandbytes and torchao use. Two things differ. Blocks lie within the rows of a tensor, so that
# ranks with different rows have the blocks of the whole tensor. And the largest number of a block is kept exactly
# whatever its sign is, so that numbers which were read from 8 bits do not change when they are kept again.

_DECADES = 7  # the shares go down to about 1e-7


def shares(signed: bool) -> list[float]:
    """The 256 shares of a block's largest number, ascending. Each decade has twice as many as the one below it."""
    positive = [
        10.0 ** (decade + 1 - _DECADES) * (0.1 + 0.9 * (i + 0.5) / steps)
        for decade in range(_DECADES)
        for steps in [2**decade if signed else 2 ** (decade + 1)]
        for i in range(steps)
    ]
    return sorted([*positive, *(-share for share in positive if signed), 0.0, 1.0])


@functools.cache
def table(signed: bool, device: torch.device) -> Tensor:
    """The shares, fp32 [256]."""
    return torch.tensor(shares(signed), dtype=torch.float32, device=device)


@functools.cache
def _positive(signed: bool) -> list[float]:
    return [share for share in shares(signed) if share > 0]


def quantize(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Blocks of numbers [N, length] → the numbers of the nearest shares, uint8 [N, length], and the scales, fp32 [N].

    Without signs, what is not 0 is not kept as 0: the optimizer divides by it. The nearest share is computed, since a
    search in the table would take a GPU several times as long.
    """
    high, low = values.amax(1), values.amin(1)
    scale = torch.where(high >= -low, high, low).float()
    share = values / torch.where(scale == 0, torch.ones_like(scale), scale)[:, None]
    size, positive, fewest = share.abs(), _positive(signed), 1 if signed else 2
    steps = torch.full_like(size, fewest)  # in the decade of a number
    within = size * 10.0 ** (_DECADES - 1)  # 0.1 to 1 in its decade
    for decade in range(1, _DECADES):
        first = fewest * (2**decade - 1)
        is_above = size > (positive[first - 1] + positive[first]) / 2
        steps = torch.where(is_above, fewest * 2.0**decade, steps)
        within = torch.where(is_above, size * 10.0 ** (_DECADES - 1 - decade), within)
    step = torch.minimum(((within - 0.1) / 0.9 * steps).floor().clamp(min=0), steps - 1)
    number = torch.where(share > (positive[-2] + positive[-1]) / 2, len(positive) - 1, steps - fewest + step)
    if signed:  # 127 shares are below 0
        codes = torch.where(share > 0, 128 + number, 126 - number)
        codes = torch.where(size <= positive[0] / 2, 127, codes)
    else:
        codes = torch.where(size > 0, 1 + number, 0)
    return codes.to(torch.uint8), scale


def dequantize(codes: Tensor, scale: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantize`. `values`: the table."""
    return values[codes.int()].to(dtype) * scale[:, None].to(dtype)
