"""Where autocast must not reach."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def no_autocast_in_16_bits(weight: Tensor) -> AbstractContextManager[Any]:
    """Autocast off where `weight` is in 16 bits; over fp32 weights it is what makes the layers compute in fewer."""
    is_off = weight.itemsize == 2 and not weight.is_meta
    return torch.autocast(weight.device.type, enabled=False) if is_off else nullcontext()
