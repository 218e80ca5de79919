"""One order for every strategy. Each of these wraps the `forward` of a unit, the innermost first:

    statistics in fp32 → low precision → compile → activation checkpointing        then the strategy shards the unit

The low-precision copies are made inside what is compiled: dynamo guards on the identity of parameters, and copies made
outside would compile every step anew. Checkpointing is outermost, so that recomputing makes the copies again instead of
keeping them. FSDP2 and DeepSpeed hook into the unit's call, around all of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from lightning.pytorch import LightningModule
from torch import nn

from shardwise.parallel.activation_checkpointing import recomputed
from shardwise.parallel.precision import Places, compute_in, dtype_of, keep_statistics_in_fp32, owners
from shardwise.parallel.units import Units
from shardwise.plan import Plan


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


def roots_of(module: LightningModule) -> list[nn.Module]:
    """What owns the parameters outside units. A module that optimizes by hand updates weights within its
    training_step: each of its networks must look at its own anew whenever it runs."""
    return [module] if module.automatic_optimization else list(module.children())


def copy_outside_units(
    module: LightningModule, units: Units, plan: Plan, copied: Callable[[nn.Parameter], bool]
) -> list[Places]:
    """What lies outside units computes on low-precision copies, too: in each step or, where a module optimizes by hand,
    in each of its networks.

    Returns:
        Where the parameters stand of which each step is to make copies.
    """
    inside = [unit for _, unit in units.modules]
    if module.automatic_optimization:
        return owners(module, but=inside, of=copied)
    dtype = dtype_of(plan.precision.compute_dtype)
    for child in roots_of(module):
        if child not in inside and (where := owners(child, but=inside, of=copied)):
            compute_in(child, dtype, where, cast_inputs=False)
    return []
