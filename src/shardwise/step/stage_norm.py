"""The norm of all gradients, where ranks have different layers."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.distributed.collectives import sum_over


class StageNorm:
    """Adds up the norms of the stages of a pipeline; without one, the norm of the only stage is that of all."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None

    def measure_over(
        self, group: dist.ProcessGroup, counted_elsewhere: Collection[int], device: torch.device, dtype: torch.dtype
    ) -> None:
        """Measure over `group`, one rank of each stage, in `dtype`.

        `counted_elsewhere`: the ids of parameters of which another stage has a copy, and counts it.
        """
        self._group, self._counted_elsewhere = group, counted_elsewhere
        self._device, self._dtype = device, dtype

    def whole(
        self,
        parameters: list[nn.Parameter],
        norms: list[Tensor],
        of_stage: Callable[[list[nn.Parameter], list[Tensor]], Tensor],
    ) -> Tensor:
        """The norm over all stages. `of_stage`: gives that of this stage. Collective."""
        if self._group is None:
            return of_stage(parameters, norms)
        own = [(p, norm) for p, norm in zip(parameters, norms, strict=True) if id(p) not in self._counted_elsewhere]
        if own:
            square = of_stage([p for p, _ in own], [norm for _, norm in own]) ** 2
        else:  # all weights of this stage are frozen
            square = torch.zeros((), device=self._device)
        return sum_over(self._group, square.to(self._dtype)).sqrt()
