"""Resolves the optimizer of a config, and refuses strategies that cannot step it."""

from __future__ import annotations

from typing import Any

from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError
from shardwise.plan.capabilities import STRATEGIES
from shardwise.plan.nodes import target_node

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
