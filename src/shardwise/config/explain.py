"""Explains in one line what is wrong with a command line."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from shardwise.config.groups import OPTIONS
from shardwise.config.paths import CONF
from shardwise.config.schema import MISSING, as_number, as_yaml, remedy_for_text
from shardwise.errors import ConfigError, did_you_mean

# What a recipe or an experiment sets, and words of the command line replace as a whole.

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


_OTHERS = {word for words in ALTERNATIVES for word in words}  # null where another word is given


def check_numbers(plain: dict[str, Any]) -> None:
    """Check that numbers of optimizers and schedules in conf/ stay finite numbers: they check little themselves.

    Numbers of the environment come as text, and are read in place, as those of the schema are: see config/schema.py.
    """
    for group in ("optimizer", "schedule"):
        node = plain.get(group)
        if not isinstance(node, dict):
            continue
        for key, default in _defaults_of(group, node.get("_target_")).items():
            value, expected = node.get(key, default), "a number"
            if key in node and (_is_number(default) or isinstance(default, list)):
                value = node[key] = as_number(value)
            if isinstance(default, list):
                expected = f"a list of {len(default)} numbers, e.g. {as_yaml(default)}"
                is_right = isinstance(value, list) and len(value) == len(default) and all(map(_is_number, value))
            else:
                is_right = (
                    _is_number(value) or not _is_number(default) or (value is None and f"{group}.{key}" in _OTHERS)
                )
            if not is_right and value != MISSING:
                as_text = remedy_for_text(value) if isinstance(default, list) else ""
                raise ConfigError(
                    f"{group}.{key}={as_yaml(value)}: must be {expected}, as it is in conf/{group}/{as_text}"
                )


@functools.cache
def _defaults_of(group: str, target: Any) -> dict[str, Any]:
    """The values in conf/GROUP for this class or function; empty if conf/ does not have it."""
    nodes = (OmegaConf.to_container(OmegaConf.load(file)) for file in sorted((CONF / group).glob("*.yaml")))
    found = next((node for node in nodes if isinstance(node, dict) and node.get("_target_") == target), {})
    return {str(key): value for key, value in found.items() if key != "_target_"} if target else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_open(plain: dict[str, Any]) -> None:
    """Refuse values that were left open, except for those of a model that no module uses."""
    missing = _missing(plain)
    below_model = {key for key in missing if key.startswith("model.")}
    keys = [key.removeprefix("module.") if key.removeprefix("module.") in below_model else key
            for key in missing if key not in below_model]  # fmt: skip
    if keys:
        give = " ".join(f"{key}=…" for key in keys)
        verb = "has" if len(keys) == 1 else "have"
        raise ConfigError(f"{', '.join(keys)} {verb} no value, and nothing can be assumed: give {give}")


def check_cluster(plain: dict[str, Any], words: tuple[str, ...]) -> None:
    """Refuse a machine's file with another's `name`, by which `shardwise submit` chooses the batch script."""
    values = [word.partition("=")[2].strip("'\"") for word in words if word.startswith("cluster=")]
    chosen = next((value for value in reversed(values) if not value.startswith("{")), None)
    node = plain.get("cluster")
    name = node.get("name") if isinstance(node, dict) else None
    if None not in (chosen, name) and str(name) != chosen:
        raise ConfigError(
            f"cluster={chosen}: the file is named {chosen}, and its name: says {name}; change that to name: {chosen}"
        )


def _missing(node: Any, prefix: str = "") -> list[str]:
    if isinstance(node, dict):
        return [key for k, v in node.items() for key in _missing(v, f"{prefix}.{k}" if prefix else str(k))]
    if isinstance(node, list):
        return [key for i, v in enumerate(node) for key in _missing(v, f"{prefix}[{i}]")]
    return [prefix] if node == MISSING else []


def explain(error: Exception, config_name: str, words: tuple[str, ...], searchpath: list[str]) -> str:
    """Turn an error of Hydra or OmegaConf into one line: what was wrong, and what would be right."""
    if isinstance(error, MissingConfigException):
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        return f"{group}={option}: no such config file; {group} is one of {', '.join(error.options or [])}"
    cause = error.__cause__ or error
    key = getattr(cause, "full_key", None) or ""
    given = next((word for word in reversed(words) if word.split("=")[0].lstrip("+~") == key), key)
    first_line = str(error).strip().splitlines()[0].rstrip(".")
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        return f"{given}: " + _no_option(key, config_name, words, searchpath)
    if isinstance(error, OmegaConfBaseException) and "nterpolation" in type(error).__name__ + first_line:
        return f"{given}: {first_line}; ${{…}} takes a key of this config, or oc.env:NAME"
    return f"{given}: {first_line}" if given else first_line


def keys_of(file: Path) -> set[str]:
    """The options that a file of conf/ has, with those of the fields that it begins with."""
    node: Any = OmegaConf.load(file)
    found = {str(key) for key in node} - {"defaults"}
    for default in node.get("defaults", ()):
        if isinstance(default, DictConfig):
            kind = OPTIONS.get(str(default.get("/shardwise_options@_here_")))
            found |= set() if kind is None else {f.name for f in dataclasses.fields(kind)}
    return found


def _no_option(key: str, config_name: str, words: tuple[str, ...], searchpath: list[str]) -> str:
    parent, _, option = key.rpartition(".")
    groups_only = [word for word in words if "." not in word.split("=")[0]]
    try:
        node = OmegaConf.select(hydra_compose(config_name, overrides=[*groups_only, *searchpath]), parent)
    except (HydraException, OmegaConfBaseException):
        return f"{parent} has no option {option}"
    if node is None:
        value = next((word.partition("=")[2] for word in words if word.partition("=")[0] == key), "…")
        hint = f", or give module.{option}={value} where it is an argument of the module's constructor"
        also = hint if parent == "optimizer" else ""
        return f"{parent} is none here, so it has no {option}; choose {parent}=… as well{also}"
    if not isinstance(node, DictConfig):
        return f"{parent} is a single value; write {parent}=…"
    known = [str(k) for k in node]
    having = [path.stem for path in sorted((CONF / parent).glob("*.yaml")) if option in keys_of(path)]
    elsewhere = f"; {' or '.join(f'{parent}={name}' for name in having)} has it" if having else ""
    return f"{parent} has no option {option}; it has {', '.join(known)}{did_you_mean(option, known)}{elsewhere}"


# Says which word a user meant who typed one that cannot be read, so that it works in a shell.


def as_text(key: str, value: str) -> str:
    """The remedy for a value that Hydra's grammar cannot read: the word with its value as quoted text."""
    if value[:1] in ("'", '"') and value.count(value[0]) == 1:
        return (
            f"its quote is not closed, perhaps since the shell took a space for its end; quote all of it: "
            f"\"{key}='{value[1:]} …'\""
        )
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
    word = f"{key}='{escaped}'"
    shown = shlex.quote(word) if any(sign in word for sign in ('"', "$", "`", "!", "\\\\")) else f'"{word}"'
    return f"if it is meant as text, quote it: {shown}"


def without_dashes(argv: list[str], unknown: str, known: Collection[str]) -> list[str]:
    """The overrides that the `unknown` flags in `argv` were meant as: `--max-steps 10` → `max_steps=10`.

    `known`: the keys and groups of a run.
    """
    meant = []
    for flag, behind in zip(argv, [*argv[1:], ""], strict=True):
        key, equals, value = flag.lstrip("-").partition("=")
        key = own if (own := key.replace("-", "_")).partition(".")[0] in known else key
        if flag.startswith("--") and f" {flag} " in f" {unknown} " and (equals or key.partition(".")[0] in known):
            is_value = behind and not behind.startswith("--") and "=" not in behind
            meant.append(f"{key}={value if equals else behind if is_value else '…'}")
    return meant
