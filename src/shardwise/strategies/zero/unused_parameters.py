"""Gives parameters that take no part in a step zero gradients, with `strategy.find_unused_parameters=true`.

Without that, finds those that ZeRO-3 would step with an earlier gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class _Zero(torch.autograd.Function):
    """A zero that depends on every parameter. It is made first, so its backward runs after all other gradients."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.shapes = [p.shape for p in parameters]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(torch.zeros_like(gradients[0]).expand(shape) for shape in ctx.shapes)


def gathered_as_one(layer: nn.Module, units: set[nn.Module]) -> Iterator[nn.Module]:
    """The units, and the outermost layers beside them: ZeRO-3 gathers each of these as a whole when it runs.

    A rank may skip weights inside one of them. It must run each of them, or the others would wait for it for ever.
    """
    for child in layer.children():
        if child in units or not units.intersection(child.modules()):
            if any(True for _ in child.parameters()):
                yield child
        else:
            yield from gathered_as_one(child, units)


def touch(layer: nn.Module, parameters: list[nn.Parameter]) -> None:
    """Let all of `parameters` take part whenever `layer` runs.

    DeepSpeed reduces gradients in the order in which they arrive. If one is missing on a rank, the gradients after it
    would be added to those of other parameters.
    """
    parameters = [p for p in parameters if p.requires_grad]
    if not parameters:
        return
    made: list[Tensor] = []

    def before(layer: nn.Module, args: Any) -> None:
        made[:] = [_Zero.apply(*parameters)] if torch.is_grad_enabled() else []  # type: ignore[no-untyped-call]

    def after(layer: nn.Module, args: Any, out: Any) -> Any:
        def add(leaf: Any) -> Any:
            if made and isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad:
                return leaf + made.pop().to(leaf.dtype)
            return leaf

        return tree_map(add, out)

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)


def touch_all(module: nn.Module, units: set[nn.Module], zero_stage: int) -> None:
    """Let every parameter of `module` take part in every step."""
    if zero_stage < 3:
        touch(module, list(module.parameters()))
        return
    wholes = list(gathered_as_one(module, units))  # all their weights are gathered while they run
    inside = {layer for whole in wholes for layer in whole.modules()}
    for whole in wholes:
        touch(whole, list(whole.parameters()))
    for layer in module.modules():  # on every rank in the same order
        if layer not in inside:
            touch(layer, list(layer.parameters(recurse=False)))


class LastGradients:
    """What ZeRO-3 keeps of a backward pass: a weight that takes no part in the next one has its last gradient there."""

    def __init__(self, engine_optimizer: Any) -> None:
        self._optimizer = engine_optimizer
        self._before: set[nn.Parameter] = set()
        self._now: set[nn.Parameter] = set()
        partition = engine_optimizer.partition_grads

        def note_and_partition(parameters: list[nn.Parameter], *args: Any) -> Any:
            self._now.update(parameters)
            return partition(parameters, *args)

        engine_optimizer.partition_grads = note_and_partition

    def left_out(self) -> set[nn.Parameter]:
        """Weights that took no part in the pass that has just ended, and would be stepped with an earlier gradient."""
        idle = {p for p in self._before - self._now if p.requires_grad}
        self._before |= self._now
        self._now.clear()
        # In later micro-batches of a step gradients are added up, unless the step is the host's.
        return idle if self._optimizer.micro_step_id == 0 or self._optimizer.offload_optimizer else set()
