"""What tensor and context parallelism need, and what they cannot be used with."""

from __future__ import annotations

from typing import Any, Literal

from shardwise.config.groups import FsdpConfig
from shardwise.config.schema import RunConfig, choose
from shardwise.errors import ConfigError
from shardwise.plan.hardware import arguments_of
from shardwise.plan.plan import Plan
from shardwise.plan.topology import Topology
from shardwise.protocols import optional, sequence_tensors_of

# What `strategy.tensor_parallel_size` has to divide, and what it cannot be used with. parallel/ divides the layers.

# Arguments of a module, or of its argument `model`, that count what is divided
_DIVIDED = ("n_heads", "n_kv_heads", "ffn_dim")


def check_tensor_parallel(config: RunConfig, topology: Topology) -> None:
    """Raises `ConfigError` for sizes that the tensor axis does not divide, as far as the config says them."""
    ranks = topology.tensor
    if ranks == 1:
        return
    given = f"strategy.tensor_parallel_size={ranks}"
    if config.stage == "predict":
        raise ConfigError(
            f"{given} stage=predict: peers would write each prediction once more; leave it out: any layout reads the "
            f"checkpoint"
        )
    sizes = arguments_of(config.module)
    _check_length(config, topology, given)
    divided = {f"model.{name}": sizes.get(name) for name in _DIVIDED}
    for name, size in divided.items():
        if isinstance(size, int) and size % ranks:
            raise ConfigError(
                f"{given} does not divide {name}={size}; use one of {_divisors(divided, topology.devices)}, or change "
                f"{name}"
            )
    vocabulary = sizes.get("vocab_size")
    if isinstance(vocabulary, int) and vocabulary < ranks:
        raise ConfigError(f"{given}: model.vocab_size={vocabulary} has not a token for each rank")


def _check_length(config: RunConfig, topology: Topology, given: str) -> None:
    """Each context rank has a part of a sequence, of which each tensor rank has a part."""
    length = config.data.get("sequence_length") if isinstance(config.data, dict) else None
    parts = topology.tensor * topology.context
    if isinstance(length, int) and length % parts:
        axes = given + (f" * strategy.context_parallel_size={topology.context} = {parts}") * (topology.context > 1)
        raise ConfigError(
            f"{axes} does not divide data.sequence_length={length}; use a multiple of {parts}, such as "
            f"data.sequence_length={max(1, length // parts) * parts}"
        )


def _divisors(sizes: dict[str, Any], devices: int) -> list[int]:
    """The sizes of the axis that divide everything."""
    wholes = [devices, *(size for size in sizes.values() if isinstance(size, int))]
    return [ranks for ranks in range(1, devices + 1) if all(size % ranks == 0 for size in wholes)]


# Decides how attention reaches positions of other ranks, and refuses what context parallelism cannot do.


def context_parallel_method(config: RunConfig) -> Literal["heads", "keys"] | None:
    """How attention reaches positions of other ranks; None: every rank computes whole sequences.

    Raises:
        ConfigError: the ranks cannot divide the sequences or the key heads equally, or the run cannot be divided.
    """
    strategy = config.strategy
    if not isinstance(strategy, FsdpConfig):
        return None
    ranks, word = strategy.context_parallel_size, strategy.context_parallel_method
    choose(("auto", "heads", "keys"), word, "strategy.context_parallel_method")  # null is a Plan's word
    rule = f"strategy.context_parallel_size={ranks}"
    if ranks <= 1:
        if word != "auto":
            raise ConfigError(
                f"strategy.context_parallel_method={word} {rule}: no sequence is divided; leave the method out, "
                f"or give a size above 1"
            )
        return None
    if config.stage == "predict":
        raise ConfigError(f"stage=predict {rule}: predictions are of whole sequences; leave it out")
    data = config.data if isinstance(config.data, dict) else {}
    length = data.get("sequence_length")
    if isinstance(length, int) and length % ranks:
        raise ConfigError(
            f"data.sequence_length={length} {rule}: {ranks} ranks cannot divide {length} positions equally; use a "
            f"multiple of {ranks}, such as data.sequence_length={max(1, length // ranks) * ranks}"
        )
    return _method(config, strategy, rule)


def _method(config: RunConfig, strategy: FsdpConfig, rule: str) -> Literal["heads", "keys"]:
    ranks, tensor = strategy.context_parallel_size, strategy.tensor_parallel_size
    word = strategy.context_parallel_method
    sizes = arguments_of(config.module)
    heads = sizes.get("n_kv_heads", sizes.get("n_heads"))
    fits = isinstance(heads, int) and heads % (ranks * tensor) == 0
    if word == "heads" and isinstance(heads, int) and not fits:
        divided = f"{rule} * strategy.tensor_parallel_size={tensor}" if tensor > 1 else rule
        raise ConfigError(
            f"strategy.context_parallel_method=heads: {divided} does not divide the model's {heads} key heads; use "
            f"strategy.context_parallel_method=keys"
        )
    if word == "heads" or (word == "auto" and fits):
        return "heads"
    return "keys"


def check_takes_context(plan: Plan, module: Any, *, has_models: bool = True) -> None:
    """Check that a LightningModule or its class takes part in context parallelism.

    `has_models`: models of Hugging Face are in it, or may be: of a class this is not known.

    Raises:
        ConfigError: it does not say what of a batch is divided, or how much a part of it counts.
    """
    ranks = plan.topology.context
    if ranks == 1:
        return
    missing = [] if sequence_tensors_of(module) else ["sequence_tensors"]
    missing += [] if optional(module, "loss_weight") else ["loss_weight"]
    if missing and not ("sequence_tensors" in missing and has_models):
        raise ConfigError(
            f"strategy.context_parallel_size={ranks}: {plan.module['_target_']} has no {' and no '.join(missing)} and "
            f"no model of Hugging Face, so its sequences cannot be divided over ranks; leave it out, or see "
            f"docs/parallelism.md for how a module takes part"
        )
    if getattr(module, "automatic_optimization", True) is False:
        raise ConfigError(
            f"strategy.context_parallel_size={ranks}: {plan.module['_target_']} optimizes by hand, so that parts of "
            f"sequences are not weighed with each other; leave it out"
        )


def explain_context(plan: Plan) -> list[str]:
    """A line where the ranks that divide a sequence are on several nodes; none otherwise."""
    topology = plan.topology
    groups = topology.groups(("context",)) if topology.context > 1 and topology.nodes > 1 else []
    if all(ranks[0] // topology.devices == ranks[-1] // topology.devices for ranks in groups):
        return []
    return [
        f"context axis: the {topology.context} ranks of a sequence are on several nodes of {topology.devices} ranks, "
        f"so attention waits for the network in every layer; a product strategy.context_parallel_size * "
        f"strategy.tensor_parallel_size that divides {topology.devices} keeps them on one"
    ]
