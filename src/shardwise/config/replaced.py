"""What a recipe or an experiment sets, and words of the command line replace as a whole."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from shardwise.config.bind import as_yaml

# Of each of these only one word is given
ALTERNATIVES = (
    ("max_steps", "max_epochs", "max_samples"),
    ("validate_every_n_steps", "validate_every_n_epochs"),
    ("checkpoint.save_every_n_steps", "checkpoint.save_every_n_epochs"),
    ("schedule.warmup_steps", "schedule.warmup_ratio"),
)


def replaced_words(composed: DictConfig, words: tuple[str, ...]) -> dict[str, str]:
    """What a file of conf/ sets (such as `max_steps=500`) → the word of the command line that takes its place."""
    found: dict[str, str] = {}
    for alternatives in ALTERNATIVES:
        given = {key: word for word in words if (key := word.partition("=")[0].lstrip("+")) in alternatives}
        by = next((word for word in given.values() if not word.endswith("=null")), None)
        for key in alternatives:
            if by is not None and key not in given and (value := OmegaConf.select(composed, key)) is not None:
                found[f"{key}={value}"] = by
    epochs = next((word for word in words if word.startswith("max_epochs=") and not word.endswith("=null")), None)
    says_when = any(word.startswith(("validate_every_n_steps=", "validate_every_n_epochs=")) for word in words)
    if epochs and not says_when and (every := composed.get("validate_every_n_steps")) is not None:
        found[f"validate_every_n_steps={every}"] = epochs  # validation comes after each epoch, as in Lightning
    return found


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
