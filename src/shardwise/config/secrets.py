"""Keeps keys and passwords of the environment out of configs: `${oc.env:MY_KEY}` stays a reference in every file."""

from __future__ import annotations

import os
import re
from typing import Any

from shardwise.errors import ConfigError

_NAMED = re.compile("KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL")
_REFERENCE = re.compile(r"\$\{oc\.env:(\w+)\}")
_SHORTEST = 8  # a shorter value may stand in a text by chance
_NODES = ("module", "model", "data", "callbacks", "loggers")  # what is built by calling classes of the user's


def environment_secrets() -> dict[str, str]:
    """The values of variables whose names say that they are keys or passwords."""
    return {name: value for name, value in os.environ.items() if _NAMED.search(name) and len(value) >= _SHORTEST}


def refer_to_secrets(config: dict[str, Any]) -> dict[str, Any]:
    """`config`, in whose arguments of classes each secret of the environment is replaced by `${oc.env:NAME}`."""
    secrets = environment_secrets()

    def refer(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: refer(item) for key, item in value.items()}
        if isinstance(value, list):
            return [refer(item) for item in value]
        if isinstance(value, str):
            for name, secret in secrets.items():
                value = value.replace(secret, f"${{oc.env:{name}}}")
        return value

    return config | {key: refer(config[key]) for key in _NODES if key in config} if secrets else config


def read_secrets(text: str, where: str) -> str:
    """`text` with the values of the environment in place of its references.

    Raises:
        ConfigError: a variable is not set in this process.
    """

    def read(reference: re.Match[str]) -> str:
        name = reference[1]
        if name not in os.environ:
            raise ConfigError(f"{where}={text}: the environment has no {name} here; set it on every node")
        return os.environ[name]

    return _REFERENCE.sub(read, text)
