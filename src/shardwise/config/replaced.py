"""What a recipe or an experiment sets, and words of the command line replace as a whole."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from shardwise.config.bind import as_yaml

LENGTHS = ("max_steps", "max_epochs", "max_samples")


def replaced_lengths(composed: DictConfig, words: tuple[str, ...]) -> list[str]:
    """The recipe's lengths (such as max_steps) that another length on the command line replaces."""
    given = dict(word.split("=", 1) for word in words if word.partition("=")[0] in LENGTHS)
    if all(value == "null" for value in given.values()):
        return []
    return [f"{word}={composed[word]}" for word in LENGTHS if word not in given and composed.get(word) is not None]


def drop_schedule(plain: dict[str, Any], words: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out, in place, what an experiment sets of a schedule if the command line says `schedule=none`.

    Returns what the user is told.
    """
    options = plain.get("schedule")
    given = [word for word in words if word.startswith(("schedule=", "schedule."))]
    if given != ["schedule=none"] or not isinstance(options, dict) or "_target_" in options:
        return ()
    plain["schedule"] = None
    set_before = ", ".join(f"schedule.{name}={as_yaml(value)}" for name, value in options.items())
    return (f"schedule=none is given, so {set_before} of the experiment does not count",)
