"""Wraps the `forward` of each unit in one order under every strategy, the innermost wrapper first:

    statistics in fp32, products in fp8 → exchange with peers → low precision → activation checkpointing → compile
    then the strategy shards the unit

The low-precision copies are made inside what is compiled: dynamo guards on the identity of parameters, and copies made
outside would compile every step anew. They are made inside what is checkpointed, too, so that recomputing makes them
again instead of keeping them. Checkpointing is inside what is compiled: the compiler then computes again only what the
backward pass needs, fused with it. Around a compiled layer, checkpointing would run all of its forward graph again, the
last matrix product included, which no gradient needs, and write out everything that the forward pass keeps. A layer
that is not one graph has its checkpointing outside nevertheless (see `one_graph_or`). FSDP2 and DeepSpeed use hooks on
the unit's call, around all of this.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from shardwise.parallel.activation_checkpointing import Contexts, keep_results_of, recomputed
from shardwise.parallel.compile import compiled, one_graph_or, prepare_compiler
from shardwise.parallel.functional_calls import refuse_functional_calls
from shardwise.parallel.layer_state import LayerState, own_attributes
from shardwise.parallel.passed_through import return_passed_tensors
from shardwise.parallel.precision import (
    ParameterSites,
    cast_forward,
    dtype_of,
    keep_statistics_in_fp32,
    parameter_sites,
)
from shardwise.parallel.units import Units
from shardwise.plan import Plan

if TYPE_CHECKING:  # needs torchao
    from shardwise.parallel.float8 import Float8Layers
    from shardwise.parallel.tensor_parallel import TensorParallel


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
    if plan.compile.name != "none":
        prepare_compiler(plan.compile, len(units.modules))
    checkpointing = plan.activation_checkpointing
    contexts = keep_results_of(checkpointing.save) if checkpointing.name == "selective" else None
    for number, (_, unit) in enumerate(units.modules):
        where = parameter_sites(unit, of=copied) if precision.is_mixed else []
        replaces_tensors = precision.is_low
        if plan.capabilities.shards_parameters:  # with find_unused_parameters a zero is added to any output
            replaces_tensors = not plan.strategy.find_unused_parameters
        if casts_inputs and replaces_tensors:
            return_passed_tensors(unit)
        if precision.is_low and (casts_inputs or where):
            cast_forward(unit, dtype_of(precision.compute_dtype), where, cast_inputs=casts_inputs)
        is_checkpointed = checkpointing.name != "none" and number % checkpointing.every_n_layers == 0
        _compile_and_checkpoint(unit, plan, contexts, is_checkpointed)
        if is_checkpointed:
            refuse_functional_calls(
                [unit],
                f"activation_checkpointing={checkpointing.name} computes it again in the backward pass, with its own "
                f"weights; use activation_checkpointing=none",
                lambda parameter: torch.is_grad_enabled(),
            )


def _compile_and_checkpoint(
    unit: nn.Module, plan: Plan, contexts: Callable[[], Contexts] | None, is_checkpointed: bool
) -> None:
    forward, options = unit.forward, plan.compile

    def checkpointed_pieces() -> Callable[..., Any]:  # inside a compiled piece no result can be told from another
        return recomputed(unit, compiled(forward, options))

    own = own_attributes(unit)
    if is_checkpointed:
        unit.forward = recomputed(unit, forward, contexts)
    if options.name == "layer":
        whole = unit.forward
        unit.forward = (
            one_graph_or(whole, checkpointed_pieces, options, lambda: LayerState(unit, own))
            if is_checkpointed
            else compiled(whole, options)
        )


def prepare_float8(module: nn.Module, plan: Plan, divided: TensorParallel | None = None) -> Float8Layers | None:
    """Let the large linear layers of `module` multiply in fp8, before `parallelize`. None: the Plan has no fp8.

    `divided`: what divides layers, which has not wrapped their forward yet.
    """
    layers = find_float8(module, plan, {} if divided is None else divided.layers)
    if layers is not None:
        layers.compute()
    return layers


def find_float8(module: nn.Module, plan: Plan, divided: dict[str, str]) -> Float8Layers | None:
    """The layers of `module` that can multiply in fp8. None: the Plan has no fp8.

    `divided`: the names of layers → what they are, as `layers_of` finds them.

    Raises:
        ConfigError: no layer can, or a rank's part of one cannot.
    """
    if plan.precision.fp8 is None:
        return None
    for name in ("torchao", "torch.utils._pytree"):  # on import torchao warns of parts of its own that nobody uses here
        logging.getLogger(name).setLevel(logging.ERROR)
    from shardwise.parallel.float8 import Float8Layers
    from shardwise.parallel.tensor_parallel import divided_layers

    return Float8Layers(module, plan.precision.fp8, divided_layers(divided), plan.topology.tensor)


def roots_of(module: LightningModule) -> list[nn.Module]:
    """The modules that own the parameters outside units: the module itself, or its networks if it optimizes by hand.

    Such a module updates weights within its training_step, so each of its networks must read its weights at each call.
    A child without a forward of its own, such as an nn.ModuleList, is never called: its networks are its children.
    """
    return [module] if module.automatic_optimization else _networks(module)


def _networks(module: nn.Module) -> list[nn.Module]:
    networks: dict[nn.Module, None] = {}
    for child in module.children():
        networks |= dict.fromkeys([child] if is_called(child) else _networks(child))
    return list(networks)


def is_called(module: nn.Module) -> bool:
    """Whether `module` has a forward of its own."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def copy_outside_units(
    module: LightningModule, units: Units, plan: Plan, copied: Callable[[nn.Parameter], bool]
) -> list[ParameterSites]:
    """Let layers outside units compute on low-precision copies, too.

    The copies are made once a step. If the module optimizes by hand, each of its networks makes them at each call.

    Returns:
        The sites of the parameters that each step must copy.
    """
    inside = [unit for _, unit in units.modules]
    if module.automatic_optimization:
        return parameter_sites(module, but=inside, of=copied)
    dtype = dtype_of(plan.precision.compute_dtype)
    for child in roots_of(module):
        if child not in inside and (where := parameter_sites(child, but=inside, of=copied)):
            cast_forward(child, dtype, where, cast_inputs=False)
    return []
