"""Reads YAML that was written for an earlier version: words that have another name or form today."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from shardwise.config.paths import CONF

GROUPS_SINCE = ("compile", "activation_checkpointing")  # options that were plain text before they became groups


def read_earlier_words(plain: dict[str, Any], overrides: Sequence[str]) -> None:
    """Read what YAML of earlier versions says in words of today, in place: `compile: model`, `benchmark: true`.

    The command line has the last word over such YAML, as it has over a group.
    """
    given = dict(word.split("=", 1) for word in overrides if "=" in word)
    for group in GROUPS_SINCE:
        if isinstance(name := plain.get(group), str):
            plain[group] = _values_of(group, given.get(group, name))
    if "benchmark" in plain:
        before = plain.pop("benchmark")
        if "cudnn_benchmark" not in given:
            plain["cudnn_benchmark"] = before
    if "detect_anomaly" in plain:
        before = plain.pop("detect_anomaly")
        if "debug.anomaly" not in given:
            plain["debug"]["anomaly"] = before


def _values_of(group: str, name: str) -> Any:
    """The values in conf/GROUP/NAME.yaml. Without such a file the name alone, which is refused later."""
    file = CONF / group / f"{name}.yaml"
    return OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else {"name": name}
