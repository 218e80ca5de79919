"""Checks the values of a config, alone and together. config/schema.py has checked their types already."""

from __future__ import annotations

import math
from types import NoneType
from typing import Any

from shardwise.config.groups import CheckpointConfig
from shardwise.config.schema import RunConfig, as_yaml
from shardwise.errors import ConfigError, a_or_an
from shardwise.plan.capabilities import STRATEGIES
from shardwise.plan.groups import check_beside_precision
from shardwise.plan.plan import RESUME_ALLOW, Host

HOOKS_WITH_WEIGHTS = (
    *(
        f"on_{stage}_{when}"
        for stage in ("train", "validation", "test", "predict")
        for when in ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")
    ),
    "on_fit_start", "on_fit_end", "on_before_zero_grad", "on_save_checkpoint", "on_load_checkpoint",
)  # fmt: skip


def check_values(config: RunConfig, host: Host, accelerator: str, checkpointing: CheckpointConfig) -> None:
    """Check the value of each field, alone and on this host.

    Raises:
        ConfigError
    """
    if config.validate_every_n_steps is not None and config.validate_every_n_epochs is not None:
        raise ConfigError(
            f"validate_every_n_steps={config.validate_every_n_steps} validate_every_n_epochs="
            f"{config.validate_every_n_epochs}: validation comes after so many steps, or after so many epochs: give "
            f"one of them"
        )
    if config.max_validation_batches is not None and config.max_validation_batches < 0:
        raise ConfigError(
            f"max_validation_batches={config.max_validation_batches}: must be at least 1, 0 for no validation, or null "
            f"for all"
        )
    if config.max_validation_batches == 0 and config.stage == "validate":
        raise ConfigError("stage=validate max_validation_batches=0: nothing would be measured; leave out one of them")
    if config.gradient_clip_val is not None and not 0 < config.gradient_clip_val < math.inf:
        raise ConfigError(
            f"gradient_clip_val={config.gradient_clip_val}: must be above 0 and finite, or null for no clipping"
        )
    if unknown := sorted(set(config.resume_allow) - set(RESUME_ALLOW)):
        raise ConfigError(f"resume_allow={as_yaml(unknown)}: known are {', '.join(RESUME_ALLOW)}")
    if unknown := sorted(set(config.whole_weights_in or ()) - set(HOOKS_WITH_WEIGHTS)):
        raise ConfigError(
            f"whole_weights_in={as_yaml(unknown)}: weights can be whole in {', '.join(HOOKS_WITH_WEIGHTS)}; in others "
            f"put `with shardwise.gathered_weights(module):` around what needs them"
        )
    if not config.guard.spike_z > 0:
        raise ConfigError(f"guard.spike_z={config.guard.spike_z}: must be above 0; guard.on_spike=ignore looks at none")
    if config.guard.on_spike == "rollback" and not checkpointing.saves:
        raise ConfigError(
            "guard.on_spike=rollback goes back to the last checkpoint, and checkpoint=none writes none: the whole run "
            "would be lost to one loss; save some, or give guard.on_spike=skip"
        )
    if config.logger.mode not in ("auto", "online", "offline"):
        raise ConfigError(f"logger.mode={config.logger.mode}: must be one of auto, online, offline")
    if config.ema_decay is not None and not 0 < config.ema_decay < 1:
        raise ConfigError(f"ema_decay={config.ema_decay}: must be between 0 and 1, e.g. 0.999, or null for no average")
    if config.memory_history and accelerator != "cuda":
        where = "the CPU" if accelerator == "cpu" else accelerator
        raise ConfigError(f"memory_history=true needs CUDA, whose allocator keeps it; leave it out on {where}")
    if config.max_restarts and host.launcher != "local":
        raise ConfigError(
            f"max_restarts={config.max_restarts}: {host.launcher} has started the ranks, and is who can start them "
            f"again; leave it out, and give {host.launcher} its own word for it, with resume=auto"
        )


def check_pairs(config: RunConfig, accelerator: str) -> None:
    """Refuse pairs of values that exclude each other. docs/numerics.md lists them with the upstream reasons."""
    strategy, precision = config.strategy.name, config.precision.name
    if config.precision.parameter_dtype == "float16":
        raise ConfigError(
            "precision.parameter_dtype=float16: gradients in float16 cannot be unscaled; use precision=fp16, whose "
            "master weights are float32, or precision=bf16_true"
        )
    if config.precision.loss_scaling != (config.precision.compute_dtype == "float16"):
        raise ConfigError(
            f"precision.compute_dtype={config.precision.compute_dtype} precision.loss_scaling="
            f"{as_yaml(config.precision.loss_scaling)}: float16, and nothing else, needs a loss scale; "
            f"use precision=fp16"
        )
    _check_strategy(config, strategy, precision, accelerator)
    check_beside_precision(config)


def _check_strategy(config: RunConfig, strategy: str, precision: str, accelerator: str) -> None:
    """Refuse what the table says that this strategy cannot do."""
    does, it, compiling = STRATEGIES[strategy], f"strategy={strategy}", config.compile
    by_value = config.gradient_clip_val and config.gradient_clip_algorithm == "value"
    replays = compiling.cudagraphs and compiling.name != "none" and accelerator == "cuda"
    refused = {
        f"{it} precision=fp64:": precision == "fp64" and does.fp64,
        f"{it} precision=fp16 on the CPU:": precision == "fp16" and accelerator == "cpu" and does.fp16_on_cpu,
        f"{it} gradient_clip_algorithm=value:": by_value and does.clip_by_value,
        f"{it} compile=model:": compiling.name == "model" and does.compiled_step,
        f"freeze_epochs={config.freeze_epochs} {it}:": config.freeze_epochs and config.freeze and does.thawing,
        f"{it} precision=fp8:": precision == "fp8" and config.precision.fp8 and does.fp8,
        f"compile.cudagraphs=true {it}: a CUDA graph replays kernels on the memory that it was recorded with, and "
        f"{strategy}": replays and does.cuda_graphs,
    }
    for what, reason in refused.items():
        if reason:
            raise ConfigError(f"{what} {reason}")


def check_plain(where: str, node: Any) -> None:
    """Refuse values that JSON would change, since ranks read the Plan as JSON."""
    if isinstance(node, dict):
        for key, value in node.items():
            if not isinstance(key, str):
                raise ConfigError(f"{where}: the key {key!r} is not text; quote it in YAML: '{key}'")
            if key == "_target_" and not isinstance(value, str):
                raise ConfigError(f"{where}._target_={as_yaml(value)}: must be a dotted path, package.module.Class")
            check_plain(f"{where}.{key}", value)
    elif isinstance(node, list):
        for i, value in enumerate(node):
            check_plain(f"{where}[{i}]", value)
    elif not isinstance(node, (str, int, float, bool, NoneType)):
        raise ConfigError(f"{where} is {a_or_an(type(node).__name__)}: must be text, a number, true, false, null, "
        f"a list or "
                          f"a mapping; quote it")  # fmt: skip


def check_schedule(schedule: dict[str, Any] | None, optimizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Check that a schedule has an optimizer, and one warm-up. Returns it without the word that is null.

    Raises:
        ConfigError
    """
    if schedule is not None and optimizer is None:
        raise ConfigError("schedule is given and optimizer is not: give optimizer=adamw, or schedule=none")
    if schedule is None:
        return None
    given = {word: schedule[word] for word in ("warmup_steps", "warmup_ratio") if schedule.get(word) is not None}
    if len(given) == 2:
        words = " ".join(f"schedule.{word}={value}" for word, value in given.items())
        raise ConfigError(f"{words}: a warm-up is a number of steps, or a share of all: give one of them")
    return {key: value for key, value in schedule.items() if value is not None or not key.startswith("warmup_")}


# Checks the parts of a config that have a `_target_`, for the Plan.

MOST_WORKERS = 16  # each has memory of its own, and more than this many seldom read faster


def data_node(node: Any, host: Host, ranks_per_node: int) -> dict[str, Any] | None:
    """The node of the data; None if it names no class, and the module's own loaders are used.

    `num_workers: auto` becomes a number: the CPUs of a rank without the one that the rank itself needs.
    """
    if not isinstance(node, dict) or node.get("_target_", "") is not None:
        made = target_node("data", _without_nulls(node))
        if made.get("num_workers") == "auto":
            cpus = host.cpus // ranks_per_node if host.cpus_per_rank is None else host.cpus_per_rank
            made = made | {"num_workers": min(max(cpus - 1, 0), MOST_WORKERS)}
        return made
    if options := _options("data", node):
        raise ConfigError(
            f"{options[0]}: an option of no class; give data._target_=package.Data, or leave it out: the module's own "
            f"loaders take no options"
        )
    return None


def _without_nulls(node: Any) -> Any:
    """The node, with None for each node directly below that names no class."""
    if not isinstance(node, dict):
        return node
    made = {}
    for key, value in node.items():
        is_null = isinstance(value, dict) and value.get("_target_", "") is None
        if is_null and (options := _options(f"data.{key}", value)):
            raise ConfigError(
                f"{options[0]}: an option of no class; give data.{key}._target_=package.Class, or leave it out"
            )
        made[key] = None if is_null else value
    return made


def _options(key: str, node: dict[str, Any]) -> list[str]:
    return [f"{key}.{name}={as_yaml(value)}" for name, value in node.items() if name != "_target_"]


def target_node(key: str, node: Any) -> dict[str, Any]:
    if not isinstance(node, dict) or "_target_" not in node:
        raise ConfigError(f"{key} names no class: give {key}._target_=package.Class")
    check_plain(key, node)
    return node


def logger_nodes(config: RunConfig) -> dict[str, dict[str, Any]]:
    loggers = named_nodes("loggers", config.loggers)
    for name, node in loggers.items():
        if node.get("log_model"):
            raise ConfigError(
                f"loggers.{name}.log_model={as_yaml(node['log_model'])}: a checkpoint is a folder in this program's "
                f"own format, and no tracker is given one; leave it out, and upload what shardwise export writes"
            )
    return loggers


def named_nodes(key: str, nodes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The nodes by name, without those that the user has set to null."""
    return {name: target_node(f"{key}.{name}", node) for name, node in nodes.items() if node is not None}
