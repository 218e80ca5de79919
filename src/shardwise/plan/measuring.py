"""What a run measures beside its training, and where it hands its numbers to Prometheus."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardwise.config.schema import MetricsConfig, Prometheus
from shardwise.errors import ConfigError

_SHORTEST_SECONDS = 0.1  # the hardware's counters of activity need so much time between two looks


@dataclass(frozen=True)
class Measuring:
    telemetry: bool = True
    telemetry_seconds: float = 5.0
    prometheus: Literal["none", "textfile", "http"] = "none"
    prometheus_directory: str | None = None
    prometheus_address: str = "127.0.0.1"
    prometheus_port: int = 0  # 0: a free one


def make_measuring(config: MetricsConfig) -> Measuring:
    """Raises ConfigError: a value that cannot be, or one that nothing would read."""
    if not _SHORTEST_SECONDS <= config.telemetry_seconds <= 3600:
        raise ConfigError(
            f"metrics.telemetry_seconds={config.telemetry_seconds}: must be at least {_SHORTEST_SECONDS}, which the "
            f"GPU's counters need, and at most 3600"
        )
    if not config.telemetry and config.telemetry_seconds != Measuring.telemetry_seconds:
        raise ConfigError(
            f"metrics.telemetry_seconds={config.telemetry_seconds}: nothing looks at a GPU with "
            f"metrics.telemetry=false; leave one out"
        )
    if not 0 <= config.prometheus_port < 2**16:
        raise ConfigError(f"metrics.prometheus_port={config.prometheus_port}: must be 1 to 65535, or 0 for a free one")
    if config.prometheus is not Prometheus.http and config.prometheus_port:
        raise ConfigError(
            f"metrics.prometheus_port={config.prometheus_port}: nothing listens with metrics.prometheus="
            f"{config.prometheus.value}; give metrics.prometheus=http"
        )
    if config.prometheus is Prometheus.none and config.prometheus_directory is not None:
        raise ConfigError(
            f"metrics.prometheus_directory={config.prometheus_directory}: nothing is written there without "
            f"metrics.prometheus=textfile, or http"
        )
    directory = config.prometheus_directory
    if directory is not None and (not directory or "\0" in directory):
        raise ConfigError(f"metrics.prometheus_directory={directory}: names no folder; give one, or null")
    return Measuring(
        telemetry=config.telemetry,
        telemetry_seconds=config.telemetry_seconds,
        prometheus=config.prometheus.value,
        prometheus_directory=None if directory is None else os.path.abspath(Path(directory).expanduser()),
        prometheus_address=config.prometheus_address,
        prometheus_port=config.prometheus_port,
    )
