"""What a run measures beside its training, and where it hands its numbers to Prometheus."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from shardwise.config.groups import MetricsConfig
from shardwise.errors import ConfigError

_SHORTEST_SECONDS = 0.1  # the hardware's counters of activity need so much time between two looks


def check_metrics(config: MetricsConfig) -> MetricsConfig:
    """The same with a whole path. Raises ConfigError: a value that cannot be, or that nothing would read."""
    if not _SHORTEST_SECONDS <= config.telemetry_seconds <= 3600:
        raise ConfigError(
            f"metrics.telemetry_seconds={config.telemetry_seconds}: must be at least {_SHORTEST_SECONDS}, which the "
            f"GPU's counters need, and at most 3600"
        )
    if not config.telemetry and config.telemetry_seconds != MetricsConfig.telemetry_seconds:
        raise ConfigError(
            f"metrics.telemetry_seconds={config.telemetry_seconds}: nothing looks at a GPU with "
            f"metrics.telemetry=false; leave one out"
        )
    if not 0 <= config.prometheus_port < 2**16:
        raise ConfigError(f"metrics.prometheus_port={config.prometheus_port}: must be 1 to 65535, or 0 for a free one")
    if config.prometheus != "http" and config.prometheus_port:
        raise ConfigError(
            f"metrics.prometheus_port={config.prometheus_port}: nothing listens with metrics.prometheus="
            f"{config.prometheus}; give metrics.prometheus=http"
        )
    if config.prometheus == "none" and config.prometheus_directory is not None:
        raise ConfigError(
            f"metrics.prometheus_directory={config.prometheus_directory}: nothing is written there without "
            f"metrics.prometheus=textfile, or http"
        )
    directory = config.prometheus_directory
    if directory is not None and (not directory or "\0" in directory):
        raise ConfigError(f"metrics.prometheus_directory={directory}: names no folder; give one, or null")
    if directory is None:
        return config
    return dataclasses.replace(config, prometheus_directory=os.path.abspath(Path(directory).expanduser()))
