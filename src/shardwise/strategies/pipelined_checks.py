"""What a module must be so that a pipeline can run it, and how it is cut."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from shardwise.checkpoint.state import layers_with_extra_state
from shardwise.errors import ConfigError
from shardwise.parallel.pipeline.placeholders import check_present
from shardwise.parallel.units import Units
from shardwise.plan import Plan
from shardwise.plan.pipeline import check_split, decoder_of, recomputed, split_units
from shardwise.step.window import check_output, loss_of


def check_module(module: LightningModule, units: Units, plan: Plan, stages: int) -> tuple[int, ...]:
    """Refuse what a pipeline cannot run; returns how many units each stage has.

    Raises:
        ConfigError
    """
    name, size = type(module).__name__, f"strategy.pipeline_parallel_size={plan.topology.pipeline}"
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
        return check_split(plan.strategy.pipeline_split, len(units.modules), stages)
    layers, behind = _costs(module, units, plan)
    return split_units(layers, stages, behind=behind)


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


def loss_in(output: Any, name: str) -> Tensor:
    """The loss in what the last stage's `training_step` has returned.

    Raises:
        ConfigError
    """
    check_output(output, name, has_own_backward=False)
    loss: Tensor = loss_of(output)
    check_present(name, loss, "the loss")
    return loss


def _costs(module: LightningModule, units: Units, plan: Plan) -> tuple[list[float], float]:
    """What each unit costs, and what stands behind them, such as the head. What stands before them is looked up.

    By the FLOPs of a decoder whose sizes the config names, else by the weights that are multiplied.
    """
    layers, decoder = [unit for _, unit in units.modules], decoder_of(plan)
    sizes = {sum(p.numel() for p in layer.parameters()) for layer in layers}
    if decoder is not None and len(layers) == decoder.n_layers and sizes == {decoder.layer_parameters}:
        return decoder.costs(plan)
    order = [layer for _, layer in module.named_modules()]
    inside = {id(part) for layer in layers for part in layer.modules()}
    behind = [layer for layer in order[order.index(layers[-1]) :] if id(layer) not in inside]
    multiplied = [sum(_multiplied(part) for part in layer.modules()) for layer in layers]
    costs = multiplied if all(multiplied) else [sum(p.numel() for p in layer.parameters()) for layer in layers]
    return [(1 + recomputed(plan) / 3) * cost for cost in costs], float(sum(map(_multiplied, behind)))


def _multiplied(layer: nn.Module) -> int:
    """The own weights of a layer that are multiplied with what comes in. A row of an embedding is looked up."""
    looked_up = isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
    return 0 if looked_up else sum(p.numel() for p in layer.parameters(recurse=False) if p.ndim > 1)
