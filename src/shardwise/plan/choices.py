"""What `loss=` and `attention=` have in common: a word of the user's, or what `auto` has become here."""

from __future__ import annotations

import dataclasses
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from shardwise.errors import ConfigError
from shardwise.plan.plan import Choice, Plan


def for_module(plan: Plan, word: str, takes_part: bool, otherwise: str) -> Plan:
    """The Plan for a module that may not let the run choose. `takes_part`: whether it has `choose_<word>`.

    `word`: "loss" or "attention". `otherwise`: the name of the choice for a module that does not take part.

    Raises:
        ConfigError: the user named a choice, and the module does not take part.
    """
    if takes_part:
        return plan
    choice: Choice = getattr(plan, f"chosen_{word}")
    why = f"{plan.module['_target_']} has no choose_{word}, so its {word} is its own"
    if not choice.reason:
        raise ConfigError(
            f"{word}={choice.name}: {why}; leave it out, or see recipes/README.md for how a module takes part"
        )
    changed: dict[str, Any] = {f"chosen_{word}": Choice(otherwise, why)}
    return dataclasses.replace(plan, **changed)


def arguments_of(module: Any) -> dict[str, Any]:
    """The arguments of the module in a config and those of its model, by which `auto` knows shapes."""
    own: dict[str, Any] = module if isinstance(module, dict) else {}
    model = own.get("model")
    return own | (model if isinstance(model, dict) else {})


def installed(package: str) -> str | None:
    """Its version, without importing it; None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
