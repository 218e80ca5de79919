"""What a module must be so that a pipeline can run it, and how it is cut."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from shardwise.checkpoint.state import layers_with_extra_state
from shardwise.errors import ConfigError
from shardwise.parallel.units import Units
from shardwise.plan import Plan
from shardwise.plan.pipeline_split import check_split, split_units


def check_module(module: LightningModule, units: Units, plan: Plan, stages: int) -> tuple[int, ...]:
    """Refuse what a pipeline cannot run; returns how many units each stage has.

    Raises:
        ConfigError
    """
    name, size = type(module).__name__, f"strategy.pipeline_parallel_size={plan.topology.pipeline}"
    if not module.automatic_optimization:
        raise ConfigError(
            f"{size}: {name} optimizes by hand, within its steps, and a pipeline runs several of them at a time; "
            f"use strategy.pipeline_parallel_size=1"
        )
    if is_overridden("backward", module):
        raise ConfigError(
            f"{size}: {name} has a backward of its own, which a pipeline cannot run; leave one of both out"
        )
    if kept := [layer for layer, _ in layers_with_extra_state(module)]:
        raise ConfigError(
            f"{size}: {kept[0] or name} keeps something besides parameters and buffers (get_extra_state), which is not "
            f"saved in a pipeline yet; use strategy.pipeline_parallel_size=1"
        )
    if len(units.modules) < stages:
        raise ConfigError(
            f"{size} makes {stages} stages of layers that repeat, and {name} has {len(units.modules)} ({units}); use a "
            f"smaller size, or units=[Name] to name layers by their class"
        )
    if plan.strategy.pipeline_split is not None:
        check_split(plan.strategy.pipeline_split, len(units.modules), stages)
        return plan.strategy.pipeline_split
    return split_units([float(_size(unit)) for _, unit in units.modules], stages, behind=_behind(module, units))


def one_tensor(output: Any, step: str) -> Tensor:
    """What a stage hands over, if it is that.

    Raises:
        ConfigError: it is the step's own result.
    """
    if not isinstance(output, Tensor):
        raise ConfigError(
            f"{step} ended on a stage of the pipeline that is not the last: it has to run through all layers that "
            f"repeat; use strategy.pipeline_parallel_size=1"
        )
    return output


def _size(layer: nn.Module) -> int:
    return sum(p.numel() for p in layer.parameters())


def _behind(module: nn.Module, units: Units) -> float:
    """The weights of the layers behind the units, such as the head. Those before them are looked up, not multiplied."""
    order = [layer for _, layer in module.named_modules()]
    last = order.index(units.modules[-1][1])
    inside = {id(part) for _, unit in units.modules for part in unit.modules()}
    behind = [layer for layer in order[last:] if id(layer) not in inside]
    return float(sum(p.numel() for layer in behind for p in layer.parameters(recurse=False)))
