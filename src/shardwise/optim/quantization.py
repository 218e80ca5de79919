"""Keeps numbers in 8 bits, each as a share of the largest number in its block.

After Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2021), with their "dynamic" table of 256 shares,
the one that bitsandbytes and torchao use. Two things differ. Blocks lie within the rows of a tensor, so that ranks with
different rows have the blocks of the whole tensor. And the largest number of a block is kept exactly whatever its sign
is, so that numbers which were read from 8 bits do not change when they are kept again.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

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
