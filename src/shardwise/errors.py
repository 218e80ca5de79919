"""What a user did wrong, said once: rule, numbers, remedy. Everything else is a bug and keeps its traceback."""

from __future__ import annotations


class ConfigError(Exception):
    """A configuration that cannot work. Shown as one message without a traceback; exit code 2."""


class DataError(ConfigError):
    """Data on disk that is missing, unreadable or not what its index says."""
