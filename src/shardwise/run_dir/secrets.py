"""Removes keys and passwords from what is written about a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwise.config.secrets import SECRET_IN_TEXT, environment_secrets, is_secret

# password=…, in the text of a message
_IN_TEXT = re.compile(
    r"(?i)((?:api_?key|access_?key|token|secret|password|passwd|pwd|passphrase)[\"']?\s*[=:]\s*)(?![\d\s]+\b)[^\s,;]+"
)
HIDDEN = "***"


def without_secrets(value: Any) -> Any:
    """`value`, in whose texts the keys and passwords of this process's environment are replaced by ***."""
    if isinstance(value, str):
        for secret in environment_secrets().values():
            value = value.replace(secret, HIDDEN)
        return value
    if isinstance(value, Mapping):
        return {key: without_secrets(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        kept = [without_secrets(item) for item in value]
        return kept if isinstance(value, list) or type(value) is not tuple else tuple(kept)
    return value


def _hide(found: re.Match[str]) -> str:
    return (found["name"] or found["scheme"] or "") + HIDDEN


def redact(value: Any, name: str = "") -> Any:
    """`value` without secrets: those of the environment, those under a name such as `api_key`, and those in addresses.

    For a page that others may see, and that may be written where the run's environment is not known.
    """
    if isinstance(value, Mapping):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(item, name) for item in value]
    if isinstance(value, str):
        return HIDDEN if value and is_secret(name) else SECRET_IN_TEXT.sub(_hide, without_secrets(value))
    return value


def redact_words(words: list[str]) -> list[str]:
    """A command line without secrets: the value of `loggers.flow.api_key=…` is hidden."""
    hidden = []
    for word in words:
        key, equals, value = word.partition("=")
        hidden.append(f"{key}={HIDDEN}" if equals and value and is_secret(key.lstrip("+-")) else redact(word))
    return hidden


def redact_text(text: str) -> str:
    """A message or a log without secrets."""
    return _IN_TEXT.sub(rf"\1{HIDDEN}", str(redact(text)))
