"""Makes parts of the Plan from parts of the config, and checks each of them."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from shardwise.config.bind import as_yaml
from shardwise.config.cluster import ClusterConfig
from shardwise.config.groups import (
    CheckpointConfig,
    CompileConfig,
    FsdpConfig,
    PrecisionConfig,
    StrategyConfig,
)
from shardwise.errors import ConfigError
from shardwise.plan.engine_knobs import check_knobs, uses_symmetric_memory
from shardwise.plan.topology import Topology

_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_YEAR_MINUTES = 365 * 24 * 60


def make_checkpointing(config: CheckpointConfig, accelerator: str) -> CheckpointConfig:
    every, keep = config.save_every_n_steps, config.keep_every_n_steps
    epochs = config.save_every_n_epochs
    if every is not None and epochs is not None:
        raise ConfigError(
            f"checkpoint.save_every_n_steps={every} checkpoint.save_every_n_epochs={epochs}: a run saves after so many "
            f"steps, or after so many epochs: give one of them"
        )
    if config.mode not in ("min", "max", None):
        raise ConfigError(f"checkpoint.mode={config.mode}: must be min or max")
    if config.mode is None and config.monitor is not None and "loss" not in config.monitor:
        raise ConfigError(
            f"checkpoint.monitor={config.monitor}: give checkpoint.mode=max if its largest value is the best, as of an "
            f"accuracy, or checkpoint.mode=min"
        )
    if keep is not None and (keep < 1 or every is None or keep % every):
        raise ConfigError(
            f"checkpoint.keep_every_n_steps={keep}: must be a multiple of checkpoint.save_every_n_steps="
            f"{as_yaml(every)}: what is kept was saved"
        )
    asynchronous = accelerator == "cuda" if config.asynchronous is None else config.asynchronous
    return dataclasses.replace(config, mode=config.mode or "min", asynchronous=asynchronous)


def make_strategy(
    config: StrategyConfig,
    precision: PrecisionConfig,
    compiling: CompileConfig,
    topology: Topology,
    accelerator: str,
    context_parallel_method: Literal["heads", "keys"] | None = None,
) -> StrategyConfig:
    if not 0 < config.timeout_minutes <= _YEAR_MINUTES:
        raise ConfigError(
            f"strategy.timeout_minutes={config.timeout_minutes}: must be above 0 and at most {_YEAR_MINUTES}, a year"
        )
    check_knobs(config, topology)
    copies = uses_symmetric_memory(config, precision, compiling, topology, accelerator)
    if not isinstance(config, FsdpConfig):
        return config
    return dataclasses.replace(config, symmetric_memory=copies, context_parallel_method=context_parallel_method)


def make_environment(cluster: ClusterConfig) -> dict[str, str]:
    for name, value in cluster.environment.items():
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise ConfigError(
                f"cluster.environment.{name}={value}: names no environment variable; e.g. NCCL_IB_TIMEOUT"
            )
    return dict(cluster.environment)
