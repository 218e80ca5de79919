"""Weights without dimensions, which FSDP2 does not shard: each rank has them, and gradients are averaged here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from shardwise.distributed.collectives import sum_over
from shardwise.step.precision_plugin import PlannedPrecision


class FsdpPrecision(PlannedPrecision):
    """Lets gradients be those of all ranks before `on_after_backward` looks at them."""

    def settle_by(self, settle: Callable[[], None]) -> None:
        """Let `settle` make them so, behind each backward pass."""
        self._settle = settle

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        self._settle()
        return super().post_backward(tensor, module)


class Scalars:
    """The weights without dimensions of a module."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
        """`group`: of the ranks whose gradients are averaged, in `dtype`; None: there is one rank."""
        self.module, self.group, self.dtype = module, group, dtype
        self._at_first = self._all()

    def _all(self) -> list[nn.Parameter]:
        return [] if self.group is None else [p for p in self.module.parameters() if p.ndim == 0]

    def hold_hooks(self) -> None:
        """Let hooks behind the sums of gradients wait for the average."""
        for p in self._at_first:
            hooks: Any = p._post_accumulate_grad_hooks or {}
            for key, hook in hooks.items():
                if not isinstance(hook, _Waiting):
                    hooks[key] = _Waiting(hook)

    def average(self) -> None:
        """Average the gradients and call the hooks that have waited. Collective."""
        trained = [p for p in self._all() if p.requires_grad]
        if self.group is None or not trained:
            return
        gradients = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in trained])
        gradients = gradients.to(self.dtype) / self.group.size()
        sum_over(self.group, gradients)
        for p, gradient in zip(trained, gradients.unbind(), strict=True):
            p.grad = gradient.to(p.dtype)
            for hook in list((p._post_accumulate_grad_hooks or {}).values()):
                if isinstance(hook, _Waiting):
                    hook.hook(p)


class _Waiting:
    """A hook in its place among those of a weight, from where its handle may remove it."""

    def __init__(self, hook: Callable[[Tensor], None]) -> None:
        self.hook = hook

    def __call__(self, parameter: Tensor) -> None:
        """Do nothing: the gradient is this rank's own yet."""
