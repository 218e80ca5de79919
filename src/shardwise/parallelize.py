"""One order for every strategy. Each of these wraps the `forward` of a unit, the innermost first:

    statistics in fp32 → low precision → compile → activation checkpointing        then the strategy shards the unit

The low-precision copies are made inside what is compiled: dynamo guards on the identity of parameters, and copies made
outside would compile every step anew. Checkpointing is outermost, so that recomputing makes the copies again instead of
keeping them. FSDP2 and DeepSpeed hook into the unit's call, around all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.plan import Plan
from shardwise.precision import compute_in, dtype_of, keep_statistics_in_fp32, owners
from shardwise.units import Units


def parallelize(
    root: nn.Module, units: Units, plan: Plan, *, copied: Callable[[nn.Parameter], bool], casts_inputs: bool
) -> None:
    """Prepare `root` for its strategy, in place.

    `copied`: whether the strategy keeps a parameter whole, so that its low-precision copy is made here.
    `casts_inputs`: the strategy does not cast the inputs of units.
    """
    precision = plan.precision
    if precision.is_low:
        keep_statistics_in_fp32(root)
    if plan.compile != "none":
        # Every kind of layer, in training and evaluation, is one graph; beyond the limit dynamo falls back to eager.
        torch._dynamo.config.recompile_limit = max(8, 4 * len(units.modules))
    for _, unit in units.modules:
        where = owners(unit, of=copied) if precision.is_mixed else []
        if precision.is_low and (casts_inputs or where):
            compute_in(unit, dtype_of(precision.compute_dtype), where, cast_inputs=casts_inputs)
        if plan.compile == "layer":
            unit.forward = torch.compile(unit.forward)
        if plan.activation_checkpointing == "full":
            unit.forward = recomputed(unit)


def recomputed(unit: nn.Module) -> Callable[..., Any]:
    """`unit.forward`, whose activations are computed again in the backward pass instead of being kept.

    Buffers that it updates (running statistics) are updated once: recomputing works on copies of all of them, since
    BatchNorm's kernel leaves no trace (`_version`) of what it has written to.
    """
    forward = unit.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # a graph has no side effects to repeat
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(
            forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _CopiedBuffers(unit)), **kwargs
        )

    return run


class _CopiedBuffers:
    """Entered again for every backward pass through one forward pass."""

    def __init__(self, unit: nn.Module) -> None:
        self.unit = unit

    def __enter__(self) -> None:
        modules = self.unit.modules()
        self.kept = [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]
        for module, name, buffer in self.kept:
            module._buffers[name] = buffer.clone()

    def __exit__(self, *_: object) -> None:
        for module, name, buffer in self.kept:
            module._buffers[name] = buffer
