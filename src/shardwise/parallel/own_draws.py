"""The random numbers of ranks that are given the same batch.

Each of them runs the same step. What it draws, such as which tokens are masked, must be the same on all of them, so
they have one stream. What layers draw where a rank has its own part of a sequence, or of the heads, must be other
numbers on each. So there a rank goes over to a stream of its own, until it has whole sequences again.

The seed of its own stream is drawn from the common one, and shows whose it is. Hence all of it follows from the state
that torch keeps for a layer that is computed again, and a checkpoint needs the common stream alone.

This is about torch's numbers on the device. Those of Python, of NumPy and, on a GPU, of torch on the host decide what
the model does, whether a layer is left out, say: they stay the same on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.accelerator import generator
from shardwise.distributed.rng import derived_seed

_OWN = 0x6F776E  # stands above the 32 bits of a seed of an own stream


class OwnDraws:
    """`place`: this rank's numbers on the axes whose ranks are given the same batch and have parts of it."""

    def __init__(self, device: torch.device, *place: int) -> None:
        self.device, self.place = device, place
        self._common: Tensor | None = None  # the state of the common stream, while this rank draws from its own

    def begin_in(self, layer: nn.Module) -> None:
        """Draw from the own stream from this layer on."""
        layer.register_forward_pre_hook(self.enter)

    def end_behind(self, layer: nn.Module) -> None:
        layer.register_forward_hook(self.leave)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self, *_: Any) -> None:
        """Go over to the own stream. Without gradients sequences are whole, and all ranks go on with one stream."""
        of_device = generator(self.device)
        if not torch.is_grad_enabled() or _is_own(of_device):
            return
        drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        self._common = of_device.get_state()
        of_device.manual_seed(_OWN << 32 | derived_seed(drawn, "layers", *self.place) & 0xFFFFFFFF)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self, *_: Any) -> None:
        """Go back to the common stream."""
        of_device = generator(self.device)
        if _is_own(of_device):
            assert self._common is not None
            of_device.set_state(self._common)


def _is_own(of_device: torch.Generator) -> bool:
    return of_device.initial_seed() >> 32 == _OWN
