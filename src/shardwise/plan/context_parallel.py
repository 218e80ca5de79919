"""Decides how attention reaches positions of other ranks, and refuses what context parallelism cannot do."""

from __future__ import annotations

from typing import Any, Literal

from shardwise.config.groups import FsdpConfig
from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError
from shardwise.plan.choices import arguments_of
from shardwise.plan.plan import Plan
from shardwise.protocols import optional, sequence_tensors_of


def context_parallel_method(config: RunConfig) -> Literal["heads", "keys"] | None:
    """How attention reaches positions of other ranks; None: every rank computes whole sequences.

    Raises:
        ConfigError: the ranks cannot divide the sequences or the key heads equally, or the run cannot be divided.
    """
    strategy = config.strategy
    if not isinstance(strategy, FsdpConfig):
        return None
    ranks, word = strategy.context_parallel_size, strategy.context_parallel_method
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
