"""Makes the Plan from RunConfig and Host, and computes every number that follows from others."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path

from shardwise.config.groups import CheckpointConfig, ClusterConfig, LoggerConfig, ProfileConfig, check_bounds
from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError
from shardwise.plan.groups import (
    check_activation_checkpointing,
    check_debugging,
    check_metrics,
    check_profiling,
    debug_environment,
    make_checkpointing,
    make_compile,
    make_environment,
    make_strategy,
)
from shardwise.plan.hardware import (
    check_accelerator,
    check_devices,
    check_float8,
    choose_accelerator,
    link_gb_per_second,
    peak_tflops,
)
from shardwise.plan.kernel_choice import choose_attention, choose_loss
from shardwise.plan.optimizer import make_optimizer
from shardwise.plan.parallel_axes import check_tensor_parallel, context_parallel_method
from shardwise.plan.pipeline import check_pipeline
from shardwise.plan.plan import FINDER_STEPS, Guard, Host, Plan
from shardwise.plan.rules import (
    check_pairs,
    check_schedule,
    check_values,
    data_node,
    logger_nodes,
    named_nodes,
    target_node,
)
from shardwise.plan.topology import Topology, make_topology


def make_plan(config: RunConfig, host: Host, clusters: Sequence[ClusterConfig] = ()) -> Plan:
    """Resolve `config` on `host`. This does not read the file system; `resume` is passed on as written.

    `clusters`: machines with known GPUs, for a `config.cluster` that does not name its GPU.

    Raises:
        ConfigError: a value that is not allowed, or two that exclude each other; the message says what to do.
    """
    if config.quick_check:
        config = for_quick_check(config)
    if config.find_learning_rate:
        config = for_learning_rate_finder(config)
    if config.preflight and host.launcher == "torchrun":
        raise ConfigError(
            "preflight=true: torchrun has started this run's ranks already; leave it out, and look the machines over "
            "before: torchrun … -m shardwise preflight …"
        )
    check_bounds(config)
    accelerator = choose_accelerator(config, host)
    topology = resolve_topology(config, host, accelerator)
    accumulate = accumulation_steps(config, topology) if config.stage == "fit" else 1
    check_pipeline(config, topology, accumulate)
    max_steps, max_epochs = duration(config) if config.stage == "fit" else (None, None)
    run_id = run_name(config, host)

    checkpoint = make_checkpointing(config.checkpoint, accelerator)
    check_values(config, host, accelerator, checkpoint)
    check_pairs(config, accelerator)
    check_tensor_parallel(config, topology)
    check_accelerator(config, accelerator, host)
    check_float8(config, host, accelerator)
    check_activation_checkpointing(config)
    check_profiling(config, host.launcher, topology, accelerator, max_steps)
    check_debugging(config, accelerator)
    if not 0 <= config.seed < 2**63:
        raise ConfigError(f"seed={config.seed}: must be in [0, 2**63)")
    optimizer = make_optimizer(config)
    schedule = None if config.schedule is None else target_node("schedule", config.schedule)
    schedule = check_schedule(schedule, optimizer)
    resolved = vars(config) | {
        "accelerator": accelerator,
        "nodes": topology.nodes,
        "devices": topology.devices,
        "init_from": initial_weights(config),
        "freeze": frozen_parts(config),
        "max_steps": max_steps,
        "max_epochs": max_epochs,
        "max_samples": None,
        "max_train_batches": check_train_batches(config, accumulate),
        "global_batch_size": config.micro_batch_size * topology.data_parallel_size * accumulate,
        "progress_bar": host.is_terminal if config.progress_bar is None else config.progress_bar,
        "strategy": make_strategy(
            config.strategy, config.precision, config.compile, topology, accelerator, context_parallel_method(config)
        ),
        "compile": make_compile(config, topology, accelerator),
        "checkpoint": checkpoint,
        "guard": Guard(**vars(config.guard)),
        "metrics": check_metrics(config.metrics),
        "model": None,  # a part of `module`
        "cluster": ClusterConfig(name=config.cluster.name),  # its prolog may hold a secret, and ranks need no more
        "module": target_node("module", config.module),
        "data": data_node(config.data, host, topology.devices),
        "optimizer": optimizer,
        "schedule": schedule,
        "callbacks": named_nodes("callbacks", config.callbacks),
        "loggers": logger_nodes(config),
    }
    if config.quick_check and config.max_validation_batches != 0:
        resolved["max_validation_batches"] = QUICK_BATCHES * topology.data_parallel_size
    return Plan(
        **resolved,
        run_id=run_id,
        run_dir=str(runs_folder(config) / run_id),
        may_fall_back=config.resume == "auto",
        launcher=host.launcher,
        topology=topology,
        peak_tflops=peak_tflops(config, host, accelerator, clusters),
        accumulate_grad_batches=accumulate,
        environment=make_environment(config.cluster) | debug_environment(config.debug),
        chosen_loss=choose_loss(config, host, accelerator),
        chosen_attention=choose_attention(config, host, accelerator),
        link_gb_per_second=link_gb_per_second(config.cluster, topology.nodes, topology.devices, accelerator),
    )


# Computes the number of ranks, of micro-batches in a step, and of steps.


def resolve_topology(config: RunConfig, host: Host, accelerator: str) -> Topology:
    for word, given, started in (("nodes", config.nodes, host.nodes), ("devices", config.devices, host.devices)):
        if given is not None and started is not None and given != started:
            raise ConfigError(
                f"{word}={given}, but {host.launcher} started {started}: leave {word} out, or make them equal"
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
    check_devices(devices, nodes, accelerator, host)
    options = vars(config.strategy)
    axes = {axis: options.get(f"{axis}_parallel_size", 1) for axis in ("context", "tensor", "pipeline")}
    return make_topology(config.strategy.name, nodes, devices, options.get("shard_size"), **axes)


def accumulation_steps(config: RunConfig, topology: Topology) -> int:
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


def check_train_batches(config: RunConfig, accumulate: int) -> int | None:
    batches = config.max_train_batches
    if batches is not None and (batches < 1 or batches % accumulate):
        near = " or ".join(str(n * accumulate) for n in (batches // accumulate, batches // accumulate + 1) if n > 0)
        raise ConfigError(
            f"max_train_batches={batches}: must be a multiple of the {accumulate} micro-batches that each rank has in "
            f"a step; use {near}"
        )
    return batches


def duration(config: RunConfig) -> tuple[int | None, int | None]:
    given = {
        w: getattr(config, w) for w in ("max_steps", "max_epochs", "max_samples") if getattr(config, w) is not None
    }
    if len(given) != 1:
        lengths = ", ".join(f"{word}={value}" for word, value in given.items()) or "none of them"
        others = " ".join(f"{word}=null" for word in list(given)[:-1])
        raise ConfigError(
            f"exactly one of max_steps, max_epochs, max_samples says how long to train; given: {lengths}; "
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


# Finds a run's name, its folder, and the weights that it starts from.

_MEMBER = re.compile(r"_\d+$")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def runs_folder(config: RunConfig) -> Path:
    try:
        if not config.runs_dir or "\0" in config.runs_dir:
            raise ValueError
        # resolve() would follow links, and so read the file system.
        return Path(os.path.abspath(Path(config.runs_dir).expanduser()))
    except (RuntimeError, ValueError):
        raise ConfigError(f"runs_dir={config.runs_dir}: names no folder; give one, e.g. runs_dir=runs") from None


def initial_weights(config: RunConfig) -> str | None:
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


def frozen_parts(config: RunConfig) -> tuple[str, ...]:
    parts, epochs = [config.freeze] if isinstance(config.freeze, str) else config.freeze, config.freeze_epochs
    if epochs is not None and not parts:
        raise ConfigError(f"freeze_epochs={epochs} and no freeze=: say what is frozen, e.g. freeze=backbone")
    return tuple(parts)


def run_name(config: RunConfig, host: Host) -> str:
    if config.name is None and config.resume == "auto" and host.run_id_is_new:
        raise ConfigError(
            "resume=auto: without name= a run has a new name each time, and no checkpoint to go on from; give name= of "
            "the run to go on with"
        )
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


def number_run(plan: Plan, number: int, in_array: bool = False) -> Plan:
    """The Plan of job `number` of a sweep, which has its own folder.

    `in_array`: its id is Slurm's for a member of a job array; the Plan's may be that of another member.
    """
    run_id = f"{_MEMBER.sub('', plan.run_id)}_{number}" if in_array else f"{plan.run_id}-{number}"
    return dataclasses.replace(plan, run_id=run_id, run_dir=str(Path(plan.run_dir).parent / run_id))


# Applies the options that change a whole config: `quick_check=true` and `find_learning_rate=true`.

QUICK_BATCHES = 3  # how many batches of every stage each rank runs


def for_quick_check(config: RunConfig) -> RunConfig:
    """Change the config to a run of a few batches of every stage, which saves no checkpoint.

    Raises:
        ConfigError: a stage other than fit, or a run that is resumed.
    """
    if config.stage != "fit" or config.resume is not None:
        word = f"stage={config.stage}" if config.stage != "fit" else f"resume={config.resume}"
        raise ConfigError(f"quick_check=true tries a new run in all its stages: leave out {word}")
    return dataclasses.replace(
        config, max_steps=QUICK_BATCHES, max_epochs=None, max_samples=None, validate_every_n_steps=QUICK_BATCHES,
        validate_every_n_epochs=None,
        checkpoint=_unsaved(config.checkpoint), logger=LoggerConfig(), loggers={}, log_every_n_steps=1, max_restarts=0,
        profile=ProfileConfig(), profiler="none",
        name=None if config.name is None else f"{config.name}-quick-check",
    )  # fmt: skip


def _unsaved(checkpoint: CheckpointConfig) -> CheckpointConfig:
    return dataclasses.replace(
        checkpoint,
        save_every_n_steps=None,
        save_every_n_epochs=None,
        save_at_end=False,
        keep_every_n_steps=None,
    )


def for_learning_rate_finder(config: RunConfig) -> RunConfig:
    """Change the config to a hundred steps without schedule, validation and checkpoint, to find a learning rate.

    Raises:
        ConfigError: a stage other than fit, a run that is resumed, or a quick check.
    """
    if config.stage != "fit" or config.resume is not None or config.quick_check:
        word = "quick_check=true" if config.quick_check else f"resume={config.resume}"
        word = word if config.stage == "fit" else f"stage={config.stage}"
        raise ConfigError(f"find_learning_rate=true trains from the start with rates of its own: leave out {word}")
    guard = dataclasses.replace(config.guard, on_nonfinite="skip", on_spike="ignore", max_in_a_row=FINDER_STEPS)
    return dataclasses.replace(
        config, max_steps=FINDER_STEPS, max_epochs=None, max_samples=None, schedule=None, guard=guard,
        checkpoint=_unsaved(config.checkpoint), max_validation_batches=0, max_restarts=0,
        name=None if config.name is None else f"{config.name}-learning-rate",
    )  # fmt: skip


# What a Plan asks for and its run is too short to reach: the peak of a learning rate, or a metric to monitor.


def explain_unreached(plan: Plan) -> list[str]:
    """Lines for the user. Such a run is valid all the same: it may be a short trial of a long one."""
    if plan.stage != "fit" or plan.quick_check or plan.find_learning_rate:
        return []
    steps, every, epochs = plan.max_steps, plan.validate_every_n_steps, plan.validate_every_n_epochs
    lines = [] if steps is None else explain_warmup(plan, steps)
    unmeasured = ""
    if plan.max_validation_batches == 0:
        unmeasured = "max_validation_batches=0 leaves validation out"
    elif every is not None and steps is not None and every > steps:
        unmeasured = f"validate_every_n_steps={every} is more than max_steps={steps}"
    elif every is None and epochs is not None and plan.max_epochs is not None and epochs > plan.max_epochs:
        unmeasured = f"validate_every_n_epochs={epochs} is more than max_epochs={plan.max_epochs}"
    if plan.checkpoint.monitor is not None and unmeasured:
        lines.append(
            f"checkpoint.monitor={plan.checkpoint.monitor} is not measured in this run, so it chooses no best "
            f"checkpoint: {unmeasured}"
        )
    return lines


def explain_warmup(plan: Plan, steps: int) -> list[str]:
    """A line for the user where the warm-up is longer than the run of so many `steps`."""
    schedule, optimizer = plan.schedule or {}, plan.optimizer or {}
    warmup = schedule.get("warmup_steps")
    ours = str(schedule.get("_target_")).startswith("shardwise.schedules.")
    if not ours or not isinstance(warmup, int) or warmup <= steps:
        return []
    peak = f"optimizer.lr={optimizer.get('lr')}"
    if plan.resume is not None:  # the checkpoint's holds, which is not known here
        peak = "the rate that its run began with"
    length = f"max_steps={steps}" if plan.max_steps else f"the {steps} steps of max_epochs={plan.max_epochs}"
    return [
        f"schedule.warmup_steps={warmup} is more than {length}: the learning rate rises to the end, and "
        f"reaches {steps / warmup:.3g} of {peak}"
    ]
