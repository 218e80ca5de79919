"""Makes the Plan from RunConfig and Host, and computes every number that follows from others."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.config.cluster import ClusterConfig
from shardwise.config.schema import RunConfig, Stage
from shardwise.errors import ConfigError
from shardwise.plan.accelerator import check_accelerator, choose_accelerator
from shardwise.plan.attention_kernel import choose_attention
from shardwise.plan.context_parallel import context_parallel_method
from shardwise.plan.hardware import link_gb_per_second, peak_tflops
from shardwise.plan.layers import make_activation_checkpointing, make_compile
from shardwise.plan.location import frozen_parts, initial_weights, run_name, runs_folder
from shardwise.plan.loss import choose_loss
from shardwise.plan.measuring import make_measuring
from shardwise.plan.modes import QUICK_BATCHES, for_learning_rate_finder, for_quick_check
from shardwise.plan.nodes import data_node, logger_nodes, named_nodes, target_node
from shardwise.plan.optimizer import make_optimizer
from shardwise.plan.parts import make_checkpointing, make_environment, make_precision, make_strategy
from shardwise.plan.pipeline import check_pipeline
from shardwise.plan.plan import (
    Guarding,
    Host,
    Logging,
    Plan,
    StageName,
)
from shardwise.plan.profiling import debug_environment, make_debugging, make_profiling
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
    stage: StageName = config.stage.value
    if config.preflight and host.launcher == "torchrun":
        raise ConfigError(
            "preflight=true: torchrun has started this run's ranks already; leave it out, and look the machines over "
            "before: torchrun … -m shardwise preflight …"
        )
    accelerator = choose_accelerator(config, host)
    topology = resolve_topology(config, host, accelerator)
    for word in ("micro_batch_size", "global_batch_size"):
        if (value := getattr(config, word)) < 1:
            raise ConfigError(f"{word}={value}: must be at least 1")
    accumulate = accumulation_steps(config, topology) if config.stage is Stage.fit else 1
    check_pipeline(config, topology, accumulate)
    max_steps, max_epochs = duration(config) if config.stage is Stage.fit else (None, None)
    run_id = run_name(config, host)

    check_values(config, host, accelerator, make_checkpointing(config.checkpoint, accelerator))
    check_pairs(config, accelerator)
    check_tensor_parallel(config, topology)
    check_accelerator(config, accelerator, host)
    if not 0 <= config.seed < 2**63:
        raise ConfigError(f"seed={config.seed}: must be in [0, 2**63)")
    optimizer = make_optimizer(config)
    schedule = None if config.schedule is None else target_node("schedule", config.schedule)
    schedule = check_schedule(schedule, optimizer)
    return Plan(
        run_id=run_id,
        run_dir=str(runs_folder(config) / run_id),
        stage=stage,
        resume=config.resume,
        init_from=initial_weights(config),
        freeze=frozen_parts(config),
        freeze_epochs=config.freeze_epochs,
        may_fall_back=config.resume == "auto",
        resume_allow=tuple(config.resume_allow),
        seed=config.seed,
        launcher=host.launcher,
        accelerator=accelerator,
        topology=topology,
        peak_tflops=peak_tflops(config, host, accelerator, clusters),
        strategy=make_strategy(
            config.strategy, config.precision, config.compile, topology, accelerator, context_parallel_method(config)
        ),
        precision=make_precision(config, host, accelerator),
        micro_batch_size=config.micro_batch_size,
        accumulate_grad_batches=accumulate,
        global_batch_size=config.micro_batch_size * topology.data_parallel_size * accumulate,
        max_steps=max_steps,
        max_epochs=max_epochs,
        gradient_clip_val=config.gradient_clip_val,
        log_every_n_steps=config.log_every_n_steps,
        validate_every_n_steps=config.validate_every_n_steps,
        validate_every_n_epochs=config.validate_every_n_epochs,
        max_validation_batches=(
            QUICK_BATCHES * topology.data_parallel_size
            if config.quick_check and config.max_validation_batches != 0
            else config.max_validation_batches
        ),
        checkpoint=make_checkpointing(config.checkpoint, accelerator),
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
        compile=make_compile(config, topology, accelerator),
        activation_checkpointing=make_activation_checkpointing(config),
        ema_decay=config.ema_decay,
        max_restarts=config.max_restarts,
        memory_history=config.memory_history,
        schedule=schedule,
        units=None if config.units is None else tuple(config.units),
        whole_weights_in=None if config.whole_weights_in is None else tuple(config.whole_weights_in),
        environment=make_environment(config.cluster) | debug_environment(config.debug),
        module=target_node("module", config.module),
        data=data_node(config.data, host, topology.devices),
        callbacks=named_nodes("callbacks", config.callbacks),
        trust=config.trust,
        loggers=logger_nodes(config),
        max_train_batches=check_train_batches(config, accumulate),
        quick_check=config.quick_check,
        find_learning_rate=config.find_learning_rate,
        gradient_clip_algorithm=config.gradient_clip_algorithm.value,
        min_steps=config.min_steps,
        min_epochs=config.min_epochs,
        cudnn_benchmark=config.cudnn_benchmark,
        profiler=config.profiler.value,
        loss=choose_loss(config, host, accelerator),
        attention=choose_attention(config, host, accelerator),
        profile=make_profiling(config, host.launcher, topology, accelerator, max_steps),
        debug=make_debugging(config, accelerator),
        metrics=make_measuring(config.metrics),
        gc_every_n_steps=config.gc_every_n_steps,
        link_gb_per_second=link_gb_per_second(config.cluster, topology.nodes, topology.devices, accelerator),
    )
