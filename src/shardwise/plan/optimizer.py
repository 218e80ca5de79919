"""Resolves the optimizer of a config, and refuses strategies that cannot step it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError
from shardwise.plan.capabilities import STRATEGIES
from shardwise.plan.plan import Plan
from shardwise.plan.rules import target_node

MUON = "shardwise.optim.muon.Muon"
_NEEDS_ROWS = {  # its word, and why
    MUON: ("muon", "a matrix is orthogonalised as a whole"),
    "shardwise.optim.adamw.AdamW8bit": ("adamw_8bit", "8-bit state is kept in blocks within rows"),
}
_DTYPES = ("float64", "float32", "bfloat16")


def make_optimizer(config: RunConfig) -> dict[str, Any] | None:
    """The node of the optimizer; None: the module brings its own.

    `newton_schulz_dtype: auto` of Muon becomes the dtype in which layers compute: bfloat16 in 16-bit precisions.

    Raises:
        ConfigError: the strategy cannot step this optimizer.
    """
    if config.optimizer is None:
        return None
    node = target_node("optimizer", config.optimizer)
    _check_bounds(node)
    strategy = config.strategy.name
    reason = config.stage == "fit" and STRATEGIES[strategy].whole_rows
    if reason and node["_target_"] in _NEEDS_ROWS:
        word, why = _NEEDS_ROWS[node["_target_"]]
        raise ConfigError(f"strategy={strategy} optimizer={word}: {why}, and {reason}")
    return node | {"newton_schulz_dtype": _newton_schulz_dtype(config, node)} if node["_target_"] == MUON else node


def _check_bounds(node: dict[str, Any]) -> None:
    """Refuse what torch's optimizers, and ours, refuse when they are built, which a dry run does not do."""
    if not node["_target_"].startswith(("torch.optim.", "shardwise.optim.")):
        return
    for key in ("lr", "eps", "weight_decay", "momentum"):
        if isinstance(value := node.get(key), (int, float)) and value < 0:
            raise ConfigError(f"optimizer.{key}={value}: must be at least 0")


def _newton_schulz_dtype(config: RunConfig, node: dict[str, Any]) -> str:
    given = node.get("newton_schulz_dtype", "auto")
    if given not in ("auto", *_DTYPES):
        raise ConfigError(f"optimizer.newton_schulz_dtype={given}: must be auto or one of {', '.join(_DTYPES)}")
    if given != "auto":
        return str(given)
    computes = config.precision.compute_dtype
    return "bfloat16" if computes == "float16" else computes


# The bytes that a weight takes, with its gradient and what the optimizer keeps for it. No torch here.

_LONGEST, _SHORTEST = 256, 64  # elements of a block; a scale of 4 bytes would be too much for a shorter one
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_WORDS = {
    "torch.optim.AdamW": "adamw",
    "torch.optim.Adam": "adam",
    "torch.optim.SGD": "sgd",
    "shardwise.optim.adamw.AdamWBf16": "adamw_bf16",
    "shardwise.optim.adamw.AdamW8bit": "adamw_8bit",
    MUON: "muon",
}


def block_length(shape: Sequence[int]) -> int | None:
    """The length of the blocks into which each row of a tensor is cut; None: its numbers are not kept in 8 bits.

    A row is what the first dimension counts. Its blocks are equally long: the longest that divide it.
    """
    row = prod(shape[1:])
    lengths = range(_LONGEST, _SHORTEST - 1, -1) if len(shape) > 1 and row else range(0)
    return next((length for length in lengths if row % length == 0), None)


def size_of(dtype: str) -> int:
    """The bytes of a number."""
    return _BYTES[dtype]


def known_optimizer(plan: Plan) -> str | None:
    """The word of an optimizer whose state is known; None: another one, or the module's own."""
    return _WORDS.get((plan.optimizer or {}).get("_target_", ""))


def bytes_of_weight(plan: Plan, shape: Sequence[int], in_layer: bool) -> float:
    """Of one weight of a tensor of `shape`, in a layer that repeats or not: itself, its gradient, the state.

    The state of an optimizer that is not known is not counted.
    """
    weight = size_of(plan.precision.parameter_dtype)
    return 2 * weight + _state(plan, shape, in_layer, weight)


def _state(plan: Plan, shape: Sequence[int], in_layer: bool, weight: int) -> float:
    word, node = known_optimizer(plan), plan.optimizer or {}
    if word == "adamw_bf16":
        return 2 * 2
    if word == "adamw_8bit":
        length = block_length(shape)
        return 2 * max(weight, 4) if length is None else 2 * (1 + 4 / length)
    if word == "muon":  # patterns of names may mean fewer matrices: then this is the least
        return weight if in_layer and len(shape) == 2 else 2 * weight
    if word == "sgd":
        return weight if node.get("momentum") else 0
    return 2 * weight * (1 + 0.5 * bool(node.get("amsgrad"))) if word else 0
