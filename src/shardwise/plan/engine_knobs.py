"""Checks the options of FSDP2 and DeepSpeed that trade memory for speed. None of them changes what is computed."""

from __future__ import annotations

from shardwise.config.groups import (
    CompileConfig,
    Dtype,
    FsdpConfig,
    PrecisionConfig,
    StrategyConfig,
    Zero1Config,
)
from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError
from shardwise.plan.capabilities import STRATEGIES
from shardwise.plan.topology import Topology


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
