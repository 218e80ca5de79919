"""An optimizer's step, group by group, for optimizers that are written here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


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
