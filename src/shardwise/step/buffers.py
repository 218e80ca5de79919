"""Buffers that training writes to, a BatchNorm's averages say: kept, put back, the same on every rank."""

from __future__ import annotations

import torch
from torch import Tensor


def _in_a_row(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
