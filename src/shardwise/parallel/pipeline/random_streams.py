"""The random numbers of a pipeline.

Every stage runs the module's own step. What the step draws before the layers that repeat, such as which tokens are
masked, must be the same on each of them: the first stage computes with it, and the last compares with it. What the
layers of a later stage draw must be other numbers than those of the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shardwise.distributed.rng import derived_seed, random_state, seed_streams, set_random_state


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
