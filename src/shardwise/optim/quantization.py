"""Keeps numbers in 8 bits, each as a share of the largest number in its block.

After Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2021), with their "dynamic" table of 256 shares,
the one that bitsandbytes and torchao use. Two things differ. Blocks lie within the rows of a tensor, so that ranks with
different rows have the blocks of the whole tensor. And the largest number of a block is kept exactly whatever its sign
is, so that numbers which were read from 8 bits do not change when they are kept again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

_LONGEST, _SHORTEST = 256, 64  # elements of a block; a scale of 4 bytes would be too much for a shorter one
_DECADES = 7  # the shares go down to about 1e-7


def block_length(shape: Sequence[int]) -> int | None:
    """The length of the blocks into which each row of a tensor is cut; None: its numbers are not kept in 8 bits.

    A row is what the first dimension counts. Its blocks are equally long: the longest that divide it.
    """
    row = prod(shape[1:])
    lengths = range(_LONGEST, _SHORTEST - 1, -1) if len(shape) > 1 and row else range(0)
    return next((length for length in lengths if row % length == 0), None)


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
def table(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The shares, fp32 [256], and the bounds between them, fp32 [255].

    Between 0 and the smallest positive share the bound of the unsigned table is 0: what is not 0 is not kept as 0. The
    optimizer divides by these numbers.
    """
    values = shares(signed)
    bounds = [(low + high) / 2 for low, high in pairwise(values)]
    if not signed:
        bounds[0] = 0.0
    shares_of, bounds_of = (torch.tensor(one, dtype=torch.float32, device=device) for one in (values, bounds))
    return shares_of, bounds_of


def quantize(values: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of numbers [N, length] → the numbers of their shares, uint8 [N, length], and their scales, fp32 [N]."""
    high, low = values.amax(1), values.amin(1)
    scale = torch.where(high >= -low, high, low).float()
    share = values / torch.where(scale == 0, torch.ones_like(scale), scale)[:, None]
    return torch.bucketize(share, bounds.to(share.dtype), out_int32=True).to(torch.uint8), scale


def dequantize(codes: Tensor, scale: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantize`. `values`: the table's shares."""
    return values[codes.int()].to(dtype) * scale[:, None].to(dtype)
