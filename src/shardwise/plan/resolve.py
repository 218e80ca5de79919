"""Makes the Plan from RunConfig and Host, and computes every number that follows from others."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.config.cluster import ClusterConfig
from shardwise.config.groups import check_bounds
from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError
from shardwise.plan.accelerator import check_accelerator, choose_accelerator
from shardwise.plan.attention_kernel import choose_attention
from shardwise.plan.context_parallel import context_parallel_method
from shardwise.plan.float8 import check_float8
from shardwise.plan.hardware import link_gb_per_second, peak_tflops
from shardwise.plan.layers import check_activation_checkpointing, make_compile
from shardwise.plan.location import frozen_parts, initial_weights, run_name, runs_folder
from shardwise.plan.loss import choose_loss
from shardwise.plan.measuring import check_metrics
from shardwise.plan.modes import QUICK_BATCHES, for_learning_rate_finder, for_quick_check
from shardwise.plan.nodes import data_node, logger_nodes, named_nodes, target_node
from shardwise.plan.optimizer import make_optimizer
from shardwise.plan.parts import make_checkpointing, make_environment, make_strategy
from shardwise.plan.pipeline import check_pipeline
from shardwise.plan.plan import Guard, Host, Plan
from shardwise.plan.profiling import check_debugging, check_profiling, debug_environment
from shardwise.plan.rules import check_pairs, check_schedule, check_values
from shardwise.plan.sizes import accumulation_steps, check_train_batches, duration, resolve_topology
from shardwise.plan.tensor_parallel import check_tensor_parallel


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
