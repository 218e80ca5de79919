"""Makes parts of the Plan from parts of the config, and checks each of them."""

from __future__ import annotations

import re

from shardwise.config.bind import as_yaml
from shardwise.config.cluster import ClusterConfig
from shardwise.config.groups import (
    CheckpointConfig,
    CompileConfig,
    PrecisionConfig,
    StrategyConfig,
)
from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError
from shardwise.plan.engine_knobs import check_knobs, uses_symmetric_memory
from shardwise.plan.float8 import make_float8
from shardwise.plan.plan import Checkpointing, Host, Precision, Strategy
from shardwise.plan.topology import Topology

_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_YEAR_MINUTES = 365 * 24 * 60
_OF_TOPOLOGY = tuple(f"{axis}_parallel_size" for axis in ("tensor", "context", "pipeline"))


def make_checkpointing(config: CheckpointConfig, accelerator: str) -> Checkpointing:
    every, keep = config.save_every_n_steps, config.keep_every_n_steps
    epochs = config.save_every_n_epochs
    for unit, value in (("steps", every), ("epochs", epochs)):
        if value is not None and value < 1:
            raise ConfigError(
                f"checkpoint.save_every_n_{unit}={value}: must be at least 1, or null to save at the end only"
            )
    if every is not None and epochs is not None:
        raise ConfigError(
            f"checkpoint.save_every_n_steps={every} checkpoint.save_every_n_epochs={epochs}: a run saves after so many "
            f"steps, or after so many epochs: give one of them"
        )
    if config.keep_last < 1:
        raise ConfigError(f"checkpoint.keep_last={config.keep_last}: must be at least 1")
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
    if config.max_failures < 0:
        raise ConfigError(f"checkpoint.max_failures={config.max_failures}: must be at least 0")
    return Checkpointing(
        save_every_n_steps=every,
        keep_last=config.keep_last,
        monitor=config.monitor,
        mode=config.mode or "min",
        save_at_end=config.save_at_end,
        keep_every_n_steps=keep,
        asynchronous=accelerator == "cuda" if config.asynchronous is None else config.asynchronous,
        when_busy=config.when_busy.value,
        max_failures=config.max_failures,
        save_every_n_epochs=epochs,
    )


def make_strategy(
    config: StrategyConfig,
    precision: PrecisionConfig,
    compiling: CompileConfig,
    topology: Topology,
    accelerator: str,
    context_parallel_method: str | None = None,
) -> Strategy:
    elsewhere = ("name", "shard_size", "context_parallel_method", *_OF_TOPOLOGY)
    options = {key: value for key, value in vars(config).items() if key not in elsewhere}
    if not 0 < config.timeout_minutes <= _YEAR_MINUTES:
        raise ConfigError(
            f"strategy.timeout_minutes={config.timeout_minutes}: must be above 0 and at most {_YEAR_MINUTES}, a year"
        )
    check_knobs(config, topology)
    options["symmetric_memory"] = uses_symmetric_memory(config, precision, compiling, topology, accelerator)
    if options.get("pipeline_split") is not None:
        options["pipeline_split"] = tuple(options["pipeline_split"])
    return Strategy(name=config.name, context_parallel_method=context_parallel_method, **options)  # type: ignore[arg-type]


def make_environment(cluster: ClusterConfig) -> dict[str, str]:
    for name, value in cluster.environment.items():
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise ConfigError(
                f"cluster.environment.{name}={value}: names no environment variable; e.g. NCCL_IB_TIMEOUT"
            )
    return dict(cluster.environment)


def make_precision(config: RunConfig, host: Host, accelerator: str) -> Precision:
    precision = config.precision
    return Precision(
        name=precision.name.value,
        parameter_dtype=precision.parameter_dtype.value,
        compute_dtype=precision.compute_dtype.value,
        reduce_dtype=precision.reduce_dtype.value,
        loss_scaling=precision.loss_scaling,
        tf32=precision.tf32,
        fp8=make_float8(config, host, accelerator),
    )
