"""Random numbers: a seed for each purpose, streams that ranks share, and streams of one rank's own."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import accelerator
from shardwise.accelerator import generator

# Derives a seed for each purpose, and saves and restores the random streams of this process.


def derived_seed(seed: int, *purpose: object) -> int:
    """A different seed for each `purpose`, the same on every platform."""
    digest = hashlib.sha256("/".join(map(str, (seed, *purpose))).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_streams(seed: int) -> None:
    """Seed the streams of torch, Python and NumPy: a module or its data may draw from each of them."""
    torch.manual_seed(seed)
    seed_host(seed)


def seed_host(seed: int) -> None:
    """Seed the streams of the host alone. It takes microseconds."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of this process's random streams: torch on the host and on `device`, Python, and NumPy if imported."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type != "cpu":
        state[device.type] = accelerator.random_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if device.type != "cpu" and device.type in state:
        accelerator.set_random_state(state[device.type], device)
    if "numpy" in state:
        import numpy

        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))


# The random numbers of ranks that are given the same batch.
#
# Each of them runs the same step. What it draws, such as which tokens are masked, must be the same on all of them, so
# they have one stream. What layers draw where a rank has its own part of a sequence, or of the heads, must be other
# numbers on each. So there a rank goes over to a stream of its own, until it has whole sequences again.
#
# The seed of its own stream is drawn from the common one, and shows whose it is. Hence all of it follows from the state
# that torch keeps for a layer that is computed again, and a checkpoint needs the common stream alone.
#
# This is about torch's numbers on the device. Those of Python, of NumPy and, on a GPU, of torch on the host decide what
# the model does, whether a layer is left out, say: they stay the same on all ranks.

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


# The random numbers of a pipeline.
#
# Every stage runs the module's own step. What the step draws before the layers that repeat, such as which tokens are
# masked, must be the same on each of them: the first stage computes with it, and the last compares with it. What the
# layers of a later stage draw must be other numbers than those of the first.


class RandomStreams:
    """`rank`: the same on all ranks of one pipeline, another one in each pipeline."""

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        self.seed, self.rank, self.device = seed, rank, device
        self._place: tuple[object, ...] = ()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Behind it the streams are as before: hooks around the steps draw the same numbers on every stage."""
        state = random_state(self.device)
        try:
            yield
        finally:
            set_random_state(state, self.device)

    def begin(self, *place: object) -> None:
        """A stage begins the step or the batch at `place`: its numbers, which are the same on every stage."""
        self._place = place
        seed_streams(derived_seed(self.seed, "pipeline", self.rank, *place))

    def enter_layers(self, stage: int, received: Tensor | None) -> Tensor | None:
        """The layers of a later stage come next. Gives what they have received."""
        seed_streams(derived_seed(self.seed, "pipeline", self.rank, *self._place, "stage", stage))
        return received
