"""What goes with a pipeline, and what does not."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardwise.config.bind import as_yaml
from shardwise.config.groups import FsdpConfig
from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError
from shardwise.plan.decoder import decoder_of
from shardwise.plan.pipeline_schedule import check_schedule
from shardwise.plan.plan import Plan
from shardwise.plan.topology import Topology
from shardwise.protocols import optional


def check_pipeline(config: RunConfig, topology: Topology, accumulate: int) -> None:
    """Refuse options of a pipeline without one, and what a pipeline cannot do.

    Raises:
        ConfigError
    """
    strategy = config.strategy
    if not isinstance(strategy, FsdpConfig):
        return
    if topology.pipeline == 1:
        _check_without(strategy)
        return
    size = f"strategy.pipeline_parallel_size={topology.pipeline}"
    schedule, chunks = strategy.pipeline_schedule, strategy.pipeline_chunks
    check_schedule(schedule, topology.pipeline, chunks, accumulate if config.stage == "fit" else topology.pipeline)
    if strategy.pipeline_split is not None:
        stages = topology.pipeline * chunks
        if len(strategy.pipeline_split) != stages or min(strategy.pipeline_split) < 1:
            raise ConfigError(
                f"strategy.pipeline_split={list(strategy.pipeline_split)}: must have {stages} numbers "
                f"(pipeline_parallel_size * pipeline_chunks), each at least 1: how many layers each stage has"
            )
    cannot = {
        "compile=model: a stage is a part of the model; use compile=layer": config.compile.name == "model",
        "stage=predict: a rank without the last stage has no predictions; leave strategy.pipeline_parallel_size out":
            config.stage == "predict",
        "find_learning_rate=true is not supported in a pipeline yet; find it without one": config.find_learning_rate,
        "quick_check=true runs predict, which a pipeline cannot; leave it out": config.quick_check,
    }  # fmt: skip
    for why, given in cannot.items():
        if given:
            raise ConfigError(f"{size} with {why}")


def check_stages(plan: Plan, module_class: Any) -> tuple[Plan, str | None]:
    """Refuse a module that runs more than once through its layers in a step, or has too few layers.

    Returns:
        The Plan without the module's options that take several passes, and a line about them for the user.

    Raises:
        ConfigError
    """
    if plan.topology.pipeline == 1:
        return plan, None
    line, find = None, optional(module_class, "several_passes")
    passes = None if find is None else find(plan.module)
    if passes is not None:
        line = (
            f"strategy.pipeline_parallel_size={plan.topology.pipeline}: a pipeline makes one pass through the layers "
            f"in a step, and generating text takes many; "
        )
        if isinstance(passes, str):
            raise ConfigError(line + passes)
        line += f"it is left out ({' '.join(f'module.{key}={as_yaml(value)}' for key, value in passes.items())})"
        plan = dataclasses.replace(plan, module=plan.module | passes)
    if plan.units is None and (decoder := decoder_of(plan)) is not None:
        decoder.split(plan)
    return plan, line


def _check_without(strategy: FsdpConfig) -> None:
    for word, default in (("pipeline_schedule", "1f1b"), ("pipeline_chunks", 1), ("pipeline_split", None)):
        if (value := getattr(strategy, word)) != default:
            raise ConfigError(
                f"strategy.{word}={value}: there is no pipeline; add strategy.pipeline_parallel_size=2, say, or leave "
                f"it out"
            )
