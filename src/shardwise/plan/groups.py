"""Checks the options of each group, and resolves those that are null or auto."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Literal

from shardwise.config.groups import (
    SAVED,
    CheckpointConfig,
    ClusterConfig,
    CompileConfig,
    DebugConfig,
    Dtype,
    FsdpConfig,
    MetricsConfig,
    PrecisionConfig,
    ProfileConfig,
    StrategyConfig,
    Zero1Config,
)
from shardwise.config.schema import RunConfig, as_yaml
from shardwise.errors import ConfigError, count, did_you_mean
from shardwise.plan.capabilities import STRATEGIES, WAITS
from shardwise.plan.plan import Compile
from shardwise.plan.topology import Topology

# Makes parts of the Plan from parts of the config, and checks each of them.

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


# Checks the options of FSDP2 and DeepSpeed that trade memory for speed. None of them changes what is computed.


def check_knobs(config: StrategyConfig, topology: Topology) -> None:
    """Raises ConfigError: a size that DeepSpeed or the ranks cannot divide."""
    if isinstance(config, Zero1Config) and config.allgather_bucket_elements % 2:
        raise ConfigError(
            f"strategy.allgather_bucket_elements={config.allgather_bucket_elements}: must be even, because DeepSpeed "
            f"aligns what it gathers to two elements"
        )
    if isinstance(config, FsdpConfig) and not isinstance(config.reshard_after_forward, bool):
        _check_group_size(config.reshard_after_forward, topology.shard * topology.context)


def overlaps_tensor_axis(
    config: StrategyConfig, precision: PrecisionConfig, compiling: CompileConfig, topology: Topology, accelerator: str
) -> bool | None:
    """Whether compiled layers compute while the ranks of a tensor axis exchange parts of the sequence by copies.

    None: null was given, and nothing that is known before the set-up hinders it.
    """
    if not isinstance(config, FsdpConfig) or topology.tensor == 1 or accelerator != "cuda":
        return False
    return False if _hindrance_of_overlap(precision, compiling) else config.symmetric_memory


def _hindrance_of_overlap(precision: PrecisionConfig, compiling: CompileConfig) -> str:
    if compiling.name == "none":
        return (
            " compile=none: parts of a sequence are copied beside compiled products; use compile=layer, or "
            "strategy.symmetric_memory=false"
        )
    if precision.name == "fp8":
        return " precision=fp8: parts of a sequence are copied beside products in 16 or 32 bits; leave it out"
    return ""


def uses_symmetric_memory(
    config: StrategyConfig, precision: PrecisionConfig, compiling: CompileConfig, topology: Topology, accelerator: str
) -> bool | None:
    """Whether ranks exchange weights and gradients by copies.

    None: null was given, and nothing that is known before the set-up hinders it.

    Raises:
        ConfigError: copies are asked for, and what the ranks exchange cannot be copied.
    """
    if not isinstance(config, FsdpConfig) or config.symmetric_memory is False:
        return False
    if topology.shard * topology.context == 1 and topology.tensor > 1 and accelerator == "cuda":
        can, hindrance = False, _hindrance_of_overlap(precision, compiling)
    else:
        hindrance = _hindrance_of_copies(config, precision.reduce_dtype, topology, accelerator)
        can = not hindrance
    if hindrance and config.symmetric_memory:
        raise ConfigError(f"strategy.symmetric_memory=true{hindrance}")
    return config.symmetric_memory if can else False


def _hindrance_of_copies(config: FsdpConfig, reduced_in: Dtype, topology: Topology, accelerator: str) -> str:
    ranks = topology.shard * topology.context
    if accelerator != "cuda":
        return f" accelerator={accelerator}: it is memory of NVIDIA GPUs; leave it out"
    if ranks == 1:
        return ": each rank has all of the parameters, and there is nothing to exchange; leave it out"
    if reduced_in not in ("float32", "bfloat16"):
        return f" precision.reduce_dtype={reduced_in}: gradients are reduced in float32 or bfloat16; leave it out"
    if not isinstance(config.reshard_after_forward, bool):
        return (
            f" strategy.reshard_after_forward={config.reshard_after_forward}: all ranks that share the parameters "
            f"gather them together; use true or false"
        )
    if config.defer_gradient_sync:
        return (
            " strategy.defer_gradient_sync=true: what is exchanged has the dtype of one micro-batch's gradients, and "
            "deferred ones add up in another; leave one of them out"
        )
    if any(len({rank // topology.devices for rank in group}) > 1 for group in topology.groups(("shard", "context"))):
        return (
            f": the {ranks} ranks that share the parameters are on several nodes of {topology.devices} devices, which "
            f"cannot copy from each other; use strategy=fsdp_hybrid, which shares them within a node, or leave it out"
        )
    return ""


def _check_group_size(size: int, ranks: int) -> None:
    if 1 < size < ranks and ranks % size == 0:
        return
    between = [n for n in range(2, ranks) if ranks % n == 0]
    remedy = f"{', '.join(map(str, between))}, true or false" if between else "true or false"
    raise ConfigError(
        f"strategy.reshard_after_forward={size}: must divide the {ranks} ranks that share the parameters into several "
        f"groups of several ranks; use {remedy} (true: over all {ranks}, false: not at all)"
    )


def check_beside_precision(config: RunConfig) -> None:
    """Refuse options that the engine would ignore, or cannot do, in this precision.

    Raises:
        ConfigError
    """
    strategy, precision = config.strategy, config.precision
    in_groups = isinstance(strategy, FsdpConfig) and not isinstance(strategy.reshard_after_forward, bool)
    if in_groups and precision.name == "fp8":
        raise ConfigError(
            f"precision=fp8 strategy.reshard_after_forward={strategy.reshard_after_forward}: FSDP2 keeps no shards "
            f"of weights that are gathered in fp8; use true or false"
        )
    reason, usual = STRATEGIES[strategy.name].buckets_in_bf16, Zero1Config()
    if precision.compute_dtype != "bfloat16" or precision.parameter_dtype != "float32" or not reason:
        return
    if getattr(strategy, "offload_optimizer", False):  # then another optimizer of DeepSpeed's, which has buckets
        return
    for word in ("reduce_bucket_elements", "overlap_comm"):
        value = getattr(strategy, word)
        if value != getattr(usual, word):
            raise ConfigError(
                f"strategy={strategy.name} precision={precision.name} strategy.{word}={str(value).lower()}: {reason}"
            )


# Decides what is compiled, and what the backward pass computes again, and refuses options that would do nothing.

_OPERATION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*){1,2}")  # namespace.name or namespace.name.overload


def make_compile(config: RunConfig, topology: Topology, accelerator: str) -> Compile:
    """Raises: ConfigError: an option that compile=none or this accelerator or checkpointing rules out."""
    options = config.compile
    name, mode = options.name, options.mode
    budget = options.memory_budget
    given = {"memory_budget": budget is not None, "recompute_elementwise": options.recompute_elementwise,
             "mode": mode != "default", "cudagraphs": options.cudagraphs}  # fmt: skip
    for word, is_given in given.items():
        if name == "none" and is_given:
            raise ConfigError(
                f"compile.{word}={as_yaml(mode if word == 'mode' else getattr(options, word))}: compile=none compiles "
                f"nothing; give compile=model or compile=layer as well, or leave it out"
            )
    if budget is not None and not 0 < budget <= 1:
        raise ConfigError(
            f"compile.memory_budget={budget}: must be above 0 and at most 1, the share of what the compiler would keep "
            f"for the backward pass, or null"
        )
    checkpointing = config.activation_checkpointing.name
    if budget is not None and checkpointing != "none":
        raise ConfigError(
            f"compile.memory_budget={budget} activation_checkpointing={checkpointing}: both decide what is kept for "
            f"the backward pass; leave out one of them"
        )
    if options.recompute_elementwise:
        _check_recomputing(budget, checkpointing, config.activation_checkpointing.every_n_layers)
    if options.cudagraphs and accelerator != "cuda":
        raise ConfigError("compile.cudagraphs=true: a CUDA graph is a GPU's; leave it out on the CPU")
    overlaps = overlaps_tensor_axis(config.strategy, config.precision, options, topology, accelerator)
    return Compile(**vars(options), overlaps_peers=overlaps)


def _check_recomputing(budget: float | None, checkpointing: str, every: int) -> None:
    word = "compile.recompute_elementwise=true"
    if budget is not None:
        raise ConfigError(
            f"{word} compile.memory_budget={budget}: both decide what is kept for the backward pass; leave out one of "
            f"them"
        )
    if checkpointing != "none" and every == 1:
        raise ConfigError(
            f"{word} activation_checkpointing={checkpointing}: checkpointed layers compute elementwise operations "
            f"again without it; leave out one of them"
        )


def check_activation_checkpointing(config: RunConfig) -> None:
    """Raises: ConfigError: an unknown operation, or an option that does nothing."""
    options = config.activation_checkpointing
    name, every, save = options.name, options.every_n_layers, options.save
    if name == "none" and every != 1:
        raise ConfigError(
            f"activation_checkpointing.every_n_layers={every}: activation_checkpointing=none checkpoints no layer; "
            f"give activation_checkpointing=full or selective as well"
        )
    key = f"activation_checkpointing.save=[{','.join(save)}]"
    if name != "selective" and save:
        raise ConfigError(f"{key}: activation_checkpointing={name} keeps no operation's result; give "
                          f"activation_checkpointing=selective as well, or leave it out")  # fmt: skip
    if name == "selective" and not save:
        raise ConfigError(f"{key}: nothing would be kept, which is activation_checkpointing=full; name some, e.g. "
                          f"[matmul,attention]")  # fmt: skip
    for word in save:
        if word not in SAVED and not _OPERATION.fullmatch(word):
            raise ConfigError(f"{key}: there is no operation {word}{did_you_mean(word, SAVED)}; known are "
                              f"{', '.join(SAVED)}, and PyTorch's own by name, e.g. aten.mm")  # fmt: skip
    if {"matmul", "every_second_matmul"} <= set(save):
        raise ConfigError(f"{key}: matmul keeps every one, every_second_matmul every second one; leave out one of them")


# What a run measures beside its training, and where it hands its numbers to Prometheus.

_SHORTEST_SECONDS = 0.1  # the hardware's counters of activity need so much time between two looks


def check_metrics(config: MetricsConfig) -> MetricsConfig:
    """The same with a whole path. Raises ConfigError: a value that cannot be, or that nothing would read."""
    if not _SHORTEST_SECONDS <= config.telemetry_seconds <= 3600:
        raise ConfigError(
            f"metrics.telemetry_seconds={config.telemetry_seconds}: must be at least {_SHORTEST_SECONDS}, which the "
            f"GPU's counters need, and at most 3600"
        )
    if not config.telemetry and config.telemetry_seconds != MetricsConfig.telemetry_seconds:
        raise ConfigError(
            f"metrics.telemetry_seconds={config.telemetry_seconds}: nothing looks at a GPU with "
            f"metrics.telemetry=false; leave one out"
        )
    if not 0 <= config.prometheus_port < 2**16:
        raise ConfigError(f"metrics.prometheus_port={config.prometheus_port}: must be 1 to 65535, or 0 for a free one")
    if config.prometheus != "http" and config.prometheus_port:
        raise ConfigError(
            f"metrics.prometheus_port={config.prometheus_port}: nothing listens with metrics.prometheus="
            f"{config.prometheus}; give metrics.prometheus=http"
        )
    if config.prometheus == "none" and config.prometheus_directory is not None:
        raise ConfigError(
            f"metrics.prometheus_directory={config.prometheus_directory}: nothing is written there without "
            f"metrics.prometheus=textfile, or http"
        )
    directory = config.prometheus_directory
    if directory is not None and (not directory or "\0" in directory):
        raise ConfigError(f"metrics.prometheus_directory={directory}: names no folder; give one, or null")
    if directory is None:
        return config
    return dataclasses.replace(config, prometheus_directory=os.path.abspath(Path(directory).expanduser()))


# Decides which steps are profiled and what helps to find a mistake, and refuses what cannot be.


def check_profiling(
    config: RunConfig, launcher: str, topology: Topology, accelerator: str, max_steps: int | None
) -> None:
    """Check `config.profile`, alone and beside the rest of the run.

    Raises:
        ConfigError
    """
    profile = config.profile
    if config.profiler == "pytorch" and config.stage == "fit" and max_steps is not None and max_steps < 5:
        raise ConfigError(
            f"profiler=pytorch max_steps={max_steps}: it leaves two steps out and records three; give profile.start=1 "
            f"in place of profiler=pytorch, or max_steps=5"
        )
    if profile.start is None:
        usual = ProfileConfig()
        if given := [f"profile.{word}" for word, value in vars(profile).items() if value != getattr(usual, word)]:
            raise ConfigError(
                f"{' '.join(given)}: profile.start=null profiles no step; give profile.start=N, or leave this out too"
            )
        return
    if config.stage != "fit":
        raise ConfigError(f"profile.start={profile.start}: stage={config.stage} makes no steps; leave it out")
    last = profile.start + profile.steps - 1
    if max_steps is not None and last > max_steps:
        raise ConfigError(
            f"profile.start={profile.start} profile.steps={profile.steps} ends with step {last}, and the run with step "
            f"{max_steps}: use profile.start={max(1, max_steps - profile.steps + 1)}, or a longer run"
        )
    if config.profiler == "pytorch":
        raise ConfigError(
            f"profile.start={profile.start} profiler=pytorch: torch profiles one window at a time; leave profiler= out"
        )
    if profile.memory and accelerator != "cuda":
        raise ConfigError(
            f"profile.memory=true needs a GPU that is CUDA, whose allocator keeps the history; leave it out on "
            f"{accelerator}"
        )
    _check_tool(profile, launcher, topology, accelerator)
    _check_ranks(profile.ranks, topology.world_size)


def _check_ranks(ranks: tuple[int, ...] | str, world_size: int) -> None:
    if ranks == "all":
        return
    wrong = isinstance(ranks, str) or not ranks or len(set(ranks)) < len(ranks)
    if wrong or not all(0 <= int(rank) < world_size for rank in ranks):
        text = ranks if isinstance(ranks, str) else f"[{','.join(map(str, ranks))}]"
        raise ConfigError(
            f"profile.ranks={text}: must be all, or a list such as [0] of ranks from 0 to {world_size - 1}, each once"
        )


def _check_tool(profile: ProfileConfig, launcher: str, topology: Topology, accelerator: str) -> None:
    tool = profile.tool
    if tool == "torch":
        return
    if accelerator != "cuda":
        raise ConfigError(f"profile.tool={tool} sees what NVIDIA's GPUs do; use profile.tool=torch on {accelerator}")
    for word in ("stacks", "memory"):
        if getattr(profile, word):
            raise ConfigError(f"profile.tool={tool} profile.{word}=true: only profile.tool=torch has it; leave one out")
    if launcher == "torchrun" or (launcher == "slurm" and tool == "ncu"):
        way = "python train.py devices=N, shardwise submit" if tool == "nsys" else "python train.py devices=1"
        raise ConfigError(
            f"profile.tool={tool} goes before each rank's command, and {launcher} has started the ranks already: use "
            f"{way}, or profile.tool=torch"
        )
    if tool == "ncu" and topology.world_size > 1:
        raise ConfigError(
            f"profile.tool=ncu runs each kernel several times, and those of NCCL would wait for each other for ever: "
            f"use strategy=ddp devices=1 in place of {count(topology.world_size, 'rank')}, or profile.tool=nsys"
        )


def check_debugging(config: RunConfig, accelerator: str) -> None:
    """Check `config.debug`, alone and beside the rest of the run.

    Raises:
        ConfigError: an option that only CUDA has, on the CPU; or debug.sync=error where each step waits on purpose.
    """
    debug = config.debug
    if accelerator != "cuda":
        why = {"sync": "tells of waiting for the device", "launch_blocking": "launches kernels", "nccl": "uses NCCL"}
        for word, does in why.items():
            value = getattr(debug, word)
            if value not in (False, "off"):
                text = "true" if value is True else value
                raise ConfigError(f"debug.{word}={text} needs CUDA: nothing on {accelerator} {does}; leave it out")
    strategy = config.strategy.name
    reasons = {"precision=fp16": config.precision.loss_scaling and WAITS,
               f"strategy={strategy}": STRATEGIES[strategy].sync_errors}  # fmt: skip
    for word, reason in reasons.items():
        if debug.sync == "error" and reason:
            raise ConfigError(f"debug.sync=error {word}: {reason}")


def debug_environment(debug: DebugConfig) -> dict[str, str]:
    """What CUDA and NCCL read from the environment."""
    words = {"CUDA_LAUNCH_BLOCKING": "1"} if debug.launch_blocking else {}
    return words | ({"NCCL_DEBUG": debug.nccl.upper()} if debug.nccl != "off" else {})
