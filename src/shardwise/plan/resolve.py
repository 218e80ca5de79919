"""RunConfig + Host → Plan: every number that follows from others."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from shardwise.config.bind import say
from shardwise.config.schema import (
    Accelerator,
    CheckpointConfig,
    ClusterConfig,
    DdpConfig,
    FsdpHybridConfig,
    LoggerConfig,
    OnNonfinite,
    OnSpike,
    RunConfig,
    Stage,
    StrategyConfig,
)
from shardwise.errors import ConfigError, count
from shardwise.plan.hardware import peak_tflops
from shardwise.plan.plan import (
    FINDER_STEPS,
    RESUME_ALLOW,
    Checkpointing,
    Guarding,
    Host,
    Logging,
    Plan,
    Precision,
    StageName,
    Strategy,
)
from shardwise.plan.rules import check_pairs, check_plain
from shardwise.plan.topology import Topology, make_topology

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_YEAR_MINUTES = 365 * 24 * 60


def make_plan(config: RunConfig, host: Host, clusters: Sequence[ClusterConfig] = ()) -> Plan:
    """Resolve `config` on `host`. The file system is not looked at; `resume` is passed on as written.

    `clusters`: the machines whose GPUs are known, where `config.cluster` does not say which it has.

    Raises:
        ConfigError: two values that cannot both be; the message says the rule, the numbers and the remedy.
    """
    if config.quick_check:
        config = _quick(config)
    if config.find_learning_rate:
        config = _finding(config)
    stage: StageName = config.stage.value
    if config.preflight and host.launcher == "torchrun":
        raise ConfigError(
            "preflight=true: torchrun has started this run's ranks already; leave it out, and look the machines over "
            "before: torchrun … -m shardwise preflight …"
        )
    accelerator = _accelerator(config, host)
    topology = _topology(config, host, accelerator)
    for word in ("micro_batch_size", "global_batch_size"):
        if (value := getattr(config, word)) < 1:
            raise ConfigError(f"{word}={value}: must be at least 1")
    accumulate = _accumulation(config, topology) if config.stage is Stage.fit else 1
    max_steps, max_epochs = _duration(config) if config.stage is Stage.fit else (None, None)
    run_id = _run_id(config, host)

    for word in ("log_every_n_steps", "validate_every_n_steps", "min_steps", "min_epochs"):
        value = getattr(config, word)
        if value is not None and value < 1:
            raise ConfigError(f"{word}={value}: must be at least 1" + _or_null(word))
    if config.max_validation_batches is not None and config.max_validation_batches < 0:
        raise ConfigError(
            f"max_validation_batches={config.max_validation_batches}: must be at least 1, 0 for no validation, or null "
            f"for all"
        )
    if config.max_validation_batches == 0 and stage == "validate":
        raise ConfigError("stage=validate max_validation_batches=0: nothing would be measured; leave out one of them")
    if config.gradient_clip_val is not None and not 0 < config.gradient_clip_val < math.inf:
        raise ConfigError(
            f"gradient_clip_val={config.gradient_clip_val}: must be above 0 and finite, or null for no clipping"
        )
    if unknown := sorted(set(config.resume_allow) - set(RESUME_ALLOW)):
        raise ConfigError(f"resume_allow={say(unknown)}: known are {', '.join(RESUME_ALLOW)}")
    if config.guard.max_in_a_row < 0:
        raise ConfigError(f"guard.max_in_a_row={config.guard.max_in_a_row}: must be at least 0")
    if not config.guard.spike_z > 0:
        raise ConfigError(f"guard.spike_z={config.guard.spike_z}: must be above 0; guard.on_spike=ignore looks at none")
    if config.guard.on_spike.value == "rollback" and not _checkpointing(config.checkpoint, accelerator).saves:
        raise ConfigError(
            "guard.on_spike=rollback goes back to the last checkpoint, and checkpoint=none writes none: the whole run "
            "would be lost to one loss; save some, or give guard.on_spike=skip"
        )
    if config.logger.mode not in ("auto", "online", "offline"):
        raise ConfigError(f"logger.mode={config.logger.mode}: must be one of auto, online, offline")
    if config.ema_decay is not None and not 0 < config.ema_decay < 1:
        raise ConfigError(f"ema_decay={config.ema_decay}: must be between 0 and 1, e.g. 0.999, or null for no average")
    if config.memory_history and accelerator == "cpu":
        raise ConfigError("memory_history=true needs CUDA, whose allocator keeps it; leave it out on the CPU")
    if config.max_restarts < 0:
        raise ConfigError(f"max_restarts={config.max_restarts}: must be at least 0")
    if config.max_restarts and host.launcher != "local":
        raise ConfigError(
            f"max_restarts={config.max_restarts}: {host.launcher} has started the ranks, and is who can start them "
            f"again; leave it out, and give {host.launcher} its own word for it, with resume=auto"
        )
    check_pairs(config, accelerator)
    if not 0 <= config.seed < 2**63:
        raise ConfigError(f"seed={config.seed}: must be in [0, 2**63)")
    optimizer = None if config.optimizer is None else _target("optimizer", config.optimizer)
    schedule = None if config.schedule is None else _target("schedule", config.schedule)
    if schedule is not None and optimizer is None:
        raise ConfigError("schedule is given and optimizer is not: give optimizer=adamw, or schedule=none")
    if schedule is not None and max_steps is None and stage == "fit":
        raise ConfigError(
            f"schedule={schedule['_target_']} needs the number of steps, which max_epochs={max_epochs} does not say "
            f"before the data is read: give max_steps=N in its place, or schedule=none"
        )
    return Plan(
        run_id=run_id,
        run_dir=str(_runs_dir(config) / run_id),
        stage=stage,
        resume=config.resume,
        init_from=_init_from(config),
        may_fall_back=config.resume == "auto",
        resume_allow=tuple(config.resume_allow),
        seed=config.seed,
        launcher=host.launcher,
        accelerator=accelerator,
        topology=topology,
        peak_tflops=peak_tflops(config, host, accelerator, clusters),
        strategy=_strategy(config.strategy),
        precision=_precision(config, accelerator),
        micro_batch_size=config.micro_batch_size,
        accumulate_grad_batches=accumulate,
        global_batch_size=config.micro_batch_size * topology.data_parallel_size * accumulate,
        max_steps=max_steps,
        max_epochs=max_epochs,
        gradient_clip_val=config.gradient_clip_val,
        log_every_n_steps=config.log_every_n_steps,
        validate_every_n_steps=config.validate_every_n_steps,
        max_validation_batches=(
            _QUICK_BATCHES * topology.data_parallel_size
            if config.quick_check and config.max_validation_batches != 0
            else config.max_validation_batches
        ),
        checkpoint=_checkpointing(config.checkpoint, accelerator),
        guard=Guarding(
            on_nonfinite=config.guard.on_nonfinite.value,
            on_spike=config.guard.on_spike.value,
            max_in_a_row=config.guard.max_in_a_row,
            spike_z=config.guard.spike_z,
        ),
        logger=Logging(
            name=config.logger.name.value,
            project=config.logger.project,
            entity=config.logger.entity,
            mode=config.logger.mode,
            tags=tuple(config.logger.tags),
        ),
        progress_bar=host.is_terminal if config.progress_bar is None else config.progress_bar,
        optimizer=optimizer,
        optimizer_override=config.optimizer_override,
        deterministic=config.deterministic,
        compile=config.compile.value,
        activation_checkpointing=config.activation_checkpointing.value,
        ema_decay=config.ema_decay,
        max_restarts=config.max_restarts,
        memory_history=config.memory_history,
        schedule=schedule,
        units=None if config.units is None else tuple(config.units),
        environment=_environment(config.cluster),
        module=_target("module", config.module),
        data=_data(config.data),
        callbacks=_named_targets("callbacks", config.callbacks),
        trust=config.trust,
        loggers=_loggers(config),
        max_train_batches=_max_train_batches(config, accumulate),
        quick_check=config.quick_check,
        find_learning_rate=config.find_learning_rate,
        gradient_clip_algorithm=config.gradient_clip_algorithm.value,
        min_steps=config.min_steps,
        min_epochs=config.min_epochs,
        benchmark=config.benchmark,
        detect_anomaly=config.detect_anomaly,
        profiler=config.profiler.value,
    )


def _checkpointing(config: CheckpointConfig, accelerator: str) -> Checkpointing:
    every, kept = config.save_every_n_steps, config.keep_every_n_steps
    if every is not None and every < 1:
        raise ConfigError(f"checkpoint.save_every_n_steps={every}: must be at least 1, or null to save at the end only")
    if config.keep_last < 1:
        raise ConfigError(f"checkpoint.keep_last={config.keep_last}: must be at least 1")
    if config.mode not in ("min", "max"):
        raise ConfigError(f"checkpoint.mode={config.mode}: must be min or max")
    if kept is not None and (kept < 1 or every is None or kept % every):
        raise ConfigError(
            f"checkpoint.keep_every_n_steps={kept}: must be a multiple of checkpoint.save_every_n_steps={say(every)}: "
            f"what is kept was saved"
        )
    if config.max_failures < 0:
        raise ConfigError(f"checkpoint.max_failures={config.max_failures}: must be at least 0")
    return Checkpointing(
        save_every_n_steps=every,
        keep_last=config.keep_last,
        monitor=config.monitor,
        mode=config.mode,
        save_at_end=config.save_at_end,
        keep_every_n_steps=kept,
        asynchronous=accelerator == "cuda" if config.asynchronous is None else config.asynchronous,
        when_busy=config.when_busy.value,
        max_failures=config.max_failures,
    )


def _or_null(word: str) -> str:
    return "" if word == "log_every_n_steps" else ", or null"


def _accelerator(config: RunConfig, host: Host) -> Literal["cpu", "cuda"]:
    match config.accelerator:
        case Accelerator.cpu:
            return "cpu"
        case Accelerator.cuda:
            if host.cuda_devices == 0:
                raise ConfigError("accelerator=cuda: this process sees 0 CUDA devices; use accelerator=cpu")
            return "cuda"
        case Accelerator.auto:
            return "cuda" if host.cuda_devices else "cpu"


def _topology(config: RunConfig, host: Host, accelerator: str) -> Topology:
    for word, asked, told in (("nodes", config.nodes, host.nodes), ("devices", config.devices, host.devices)):
        if asked is not None and told is not None and asked != told:
            raise ConfigError(
                f"{word}={asked}, but {host.launcher} started {told}: leave {word} out, or make them equal"
            )
    nodes = config.nodes if config.nodes is not None else host.nodes or 1
    devices = config.devices if config.devices is not None else host.devices or 1
    for word, value in (("nodes", nodes), ("devices", devices)):
        if value < 1:
            raise ConfigError(f"{word}={value}: must be at least 1")
    if nodes > 1 and host.launcher == "local":
        raise ConfigError(
            f"nodes={nodes}: a local launch is one node; use nodes=1, or start train.py on every node: "
            f"shardwise submit nodes={nodes} …, srun, or torchrun"
        )
    if (per_node := config.cluster.devices_per_node) is not None:
        if per_node < 1:
            raise ConfigError(f"cluster.devices_per_node={per_node}: must be at least 1, or null")
        if devices > per_node:
            raise ConfigError(
                f"devices={devices} is more than a node of cluster={config.cluster.name} has, {per_node}; use "
                f"devices={per_node} or fewer, and more nodes"
            )
    if accelerator == "cuda" and devices > host.cuda_devices:
        if host.launcher == "slurm":
            raise ConfigError(
                f"srun started {count(devices, 'task')} a node, and each sees {host.cuda_devices} of its CUDA "
                f"devices: give "
                f"--gpus-per-node={devices}, not --gpus-per-task, which hides a rank's GPUs from its peers"
            )
        raise ConfigError(
            f"devices={devices} is more than the {count(host.cuda_devices, 'CUDA device')} that this process sees; use "
            f"devices={host.cuda_devices} or fewer, or accelerator=cpu"
        )
    shard_size = config.strategy.shard_size if isinstance(config.strategy, FsdpHybridConfig) else None
    return make_topology(config.strategy.name.value, nodes, devices, shard_size)


def _accumulation(config: RunConfig, topology: Topology) -> int:
    micro, batch, ranks = config.micro_batch_size, config.global_batch_size, topology.data_parallel_size
    step = micro * ranks
    if batch % step:
        below, above = batch // step * step, (batch // step + 1) * step
        near = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            f"global_batch_size={batch} is not a multiple of micro_batch_size * data_parallel_size = "
            f"{micro} * {ranks}; use {near}"
        )
    return batch // step


def _max_train_batches(config: RunConfig, accumulate: int) -> int | None:
    batches = config.max_train_batches
    if batches is not None and (batches < 1 or batches % accumulate):
        near = " or ".join(str(n * accumulate) for n in (batches // accumulate, batches // accumulate + 1) if n > 0)
        raise ConfigError(
            f"max_train_batches={batches}: must be a multiple of the {accumulate} micro-batches that each rank has in "
            f"a step; use {near}"
        )
    return batches


_QUICK_BATCHES = 3  # of every stage, on each rank


def _quick(config: RunConfig) -> RunConfig:
    """The same run for a few batches of every stage, which leaves nothing behind.

    Raises:
        ConfigError: a stage other than fit, or a run to go on with: there is nothing to check on.
    """
    if config.stage is not Stage.fit or config.resume is not None:
        word = f"stage={config.stage.value}" if config.stage is not Stage.fit else f"resume={config.resume}"
        raise ConfigError(f"quick_check=true tries a new run in all its stages: leave out {word}")
    return dataclasses.replace(
        config, max_steps=_QUICK_BATCHES, max_epochs=None, max_samples=None, validate_every_n_steps=_QUICK_BATCHES,
        checkpoint=_unsaved(config.checkpoint), logger=LoggerConfig(), loggers={}, log_every_n_steps=1, max_restarts=0,
        name=None if config.name is None else f"{config.name}-quick-check",
    )  # fmt: skip


def _unsaved(checkpoint: CheckpointConfig) -> CheckpointConfig:
    return dataclasses.replace(
        checkpoint, save_every_n_steps=None, save_at_end=False, monitor=None, keep_every_n_steps=None
    )


def _finding(config: RunConfig) -> RunConfig:
    """The same run for the learning-rate finder: a hundred steps, no schedule, no validation, no checkpoint.

    Raises:
        ConfigError: a stage other than fit, a run to go on with, or a quick check.
    """
    if config.stage is not Stage.fit or config.resume is not None or config.quick_check:
        word = "quick_check=true" if config.quick_check else f"resume={config.resume}"
        word = word if config.stage is Stage.fit else f"stage={config.stage.value}"
        raise ConfigError(f"find_learning_rate=true trains from the start with rates of its own: leave out {word}")
    guard = dataclasses.replace(
        config.guard, on_nonfinite=OnNonfinite.skip, on_spike=OnSpike.ignore, max_in_a_row=FINDER_STEPS
    )
    return dataclasses.replace(
        config, max_steps=FINDER_STEPS, max_epochs=None, max_samples=None, schedule=None, guard=guard,
        checkpoint=_unsaved(config.checkpoint), max_validation_batches=0, max_restarts=0,
        name=None if config.name is None else f"{config.name}-learning-rate",
    )  # fmt: skip


def _duration(config: RunConfig) -> tuple[int | None, int | None]:
    given = {
        w: getattr(config, w) for w in ("max_steps", "max_epochs", "max_samples") if getattr(config, w) is not None
    }
    if len(given) != 1:
        said = ", ".join(f"{word}={value}" for word, value in given.items()) or "none of them"
        others = " ".join(f"{word}=null" for word in list(given)[:-1])
        raise ConfigError(
            f"exactly one of max_steps, max_epochs, max_samples says how long to train; given: {said}; "
            + (f"add {others}" if given else "give max_steps=N")
        )
    word, value = next(iter(given.items()))
    if value < 1:
        raise ConfigError(f"{word}={value}: must be at least 1")
    if word == "max_epochs":
        return None, value
    if word == "max_steps":
        return value, None
    if value % config.global_batch_size:
        steps = value // config.global_batch_size
        near = " or ".join(str(n * config.global_batch_size) for n in (steps, steps + 1) if n)
        raise ConfigError(
            f"max_samples={value} is not a multiple of global_batch_size={config.global_batch_size}; use {near}"
        )
    return value // config.global_batch_size, None


def _runs_dir(config: RunConfig) -> Path:
    try:
        if not config.runs_dir or "\0" in config.runs_dir:
            raise ValueError
        # Not resolve(), which follows links: nothing is looked at here.
        return Path(os.path.abspath(Path(config.runs_dir).expanduser()))
    except (RuntimeError, ValueError):
        raise ConfigError(f"runs_dir={config.runs_dir}: names no folder; give one, e.g. runs_dir=runs") from None


def _init_from(config: RunConfig) -> str | None:
    if config.init_from is None:
        return None
    if config.resume not in (None, "auto", "best"):
        raise ConfigError(
            f"init_from={config.init_from} resume={config.resume}: a checkpoint has its own weights; give one of them"
        )
    try:
        if not config.init_from or "\0" in config.init_from:
            raise ValueError
        return os.path.abspath(Path(config.init_from).expanduser())
    except (RuntimeError, ValueError):
        raise ConfigError(f"init_from={config.init_from}: names no file or folder; give one, or null") from None


def _run_id(config: RunConfig, host: Host) -> str:
    run_id = config.name if config.name is not None else host.run_id
    if run_id is None:
        raise ConfigError(
            "the ranks cannot agree on a run id: torchrun was started on several nodes without --rdzv-id; "
            "add --rdzv-id=ID, or name=NAME"
        )
    if not _NAME.fullmatch(run_id):
        raise ConfigError(
            f"name={run_id!r} cannot name a folder under {config.runs_dir}: use letters, digits, '.', '_' and '-', "
            f"starting with a letter or digit, at most 128"
        )
    return run_id


def _strategy(config: StrategyConfig) -> Strategy:
    options = {key: value for key, value in vars(config).items() if key not in ("name", "shard_size")}
    if not 0 < config.timeout_minutes <= _YEAR_MINUTES:
        raise ConfigError(
            f"strategy.timeout_minutes={config.timeout_minutes}: must be above 0 and at most {_YEAR_MINUTES}, a year"
        )
    if isinstance(config, DdpConfig) and config.bucket_cap_mb < 1:
        raise ConfigError(f"strategy.bucket_cap_mb={config.bucket_cap_mb}: must be at least 1")
    return Strategy(name=config.name.value, **options)


def _environment(cluster: ClusterConfig) -> dict[str, str]:
    for word, value in cluster.environment.items():
        if not _VARIABLE.fullmatch(word) or "\0" in value:
            raise ConfigError(
                f"cluster.environment.{word}={value}: names no environment variable; e.g. NCCL_IB_TIMEOUT"
            )
    return dict(cluster.environment)


def _precision(config: RunConfig, accelerator: str) -> Precision:
    precision = config.precision
    if precision.tf32 and accelerator == "cpu":
        raise ConfigError(
            f"precision={precision.name.value} needs CUDA: TensorFloat-32 is a mode of its tensor cores; "
            f"on the CPU use precision=fp32"
        )
    return Precision(
        name=precision.name.value,
        parameter_dtype=precision.parameter_dtype.value,
        compute_dtype=precision.compute_dtype.value,
        reduce_dtype=precision.reduce_dtype.value,
        loss_scaling=precision.loss_scaling,
        tf32=precision.tf32,
    )


def _data(node: Any) -> dict[str, Any] | None:
    """None: no class is named, and the module's own loaders are used."""
    if not isinstance(node, dict) or node.get("_target_", "") is not None:
        return _target("data", node)
    if options := [f"data.{key}={say(value)}" for key, value in node.items() if key != "_target_"]:
        raise ConfigError(
            f"{options[0]}: an option of no class; give data._target_=package.Data, or leave it out: the module's own "
            f"loaders take no options"
        )
    return None


def _target(word: str, node: Any) -> dict[str, Any]:
    if not isinstance(node, dict) or "_target_" not in node:
        raise ConfigError(f"{word} names no class: give {word}._target_=package.Class")
    check_plain(word, node)
    return node


def _loggers(config: RunConfig) -> dict[str, dict[str, Any]]:
    loggers = _named_targets("loggers", config.loggers)
    for name, node in loggers.items():
        if node.get("log_model"):
            raise ConfigError(
                f"loggers.{name}.log_model={say(node['log_model'])}: a checkpoint is a folder in this program's own "
                f"format, and no tracker is given one; leave it out, and upload what shardwise export writes"
            )
    return loggers


def _named_targets(word: str, nodes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Name → node. A name that is null has been taken out again."""
    return {name: _target(f"{word}.{name}", node) for name, node in nodes.items() if node is not None}


def number_run(plan: Plan, number: int) -> Plan:
    """The Plan of one job of a sweep, with a folder of its own."""
    run_id = f"{plan.run_id}-{number}"
    return dataclasses.replace(plan, run_id=run_id, run_dir=str(Path(plan.run_dir).parent / run_id))
