"""What a user did wrong, said once: rule, numbers, remedy. Everything else is a bug and keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(Exception):
    """A configuration that cannot work. Shown as one message without a traceback; exit code 2."""


class DataError(ConfigError):
    """Data on disk that is missing, unreadable or not what its index says."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint to append to a message: the known word that is nearest, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
