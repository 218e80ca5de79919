"""Finds the peak speed of the GPU."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from shardwise.config.cluster import ClusterConfig
from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError
from shardwise.plan.plan import Host


def peak_tflops(config: RunConfig, host: Host, accelerator: str, clusters: Sequence[ClusterConfig]) -> float | None:
    """The dense peak of one GPU in the run's precision, in TFLOP/s; None on a CPU, or if it is not known.

    Raises:
        ConfigError: a peak that is not positive, or a cluster with another GPU than this machine's.
    """
    for name, value in vars(config.cluster.peak_tflops).items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"cluster.peak_tflops.{name}={value}: must be above 0 and finite, or null")
    if accelerator == "cpu":
        return None
    cluster, gpu = config.cluster, host.gpu
    matching = [known for known in clusters if gpu is not None and is_gpu(known.gpu, gpu)]
    if cluster.gpu is not None and gpu is not None and not is_gpu(cluster.gpu, gpu):
        right = " or ".join(f"cluster={known.name}" for known in [*matching, ClusterConfig()])
        raise ConfigError(
            f"cluster={cluster.name} has {cluster.gpu} GPUs, and this machine has {gpu}: its speed would be held "
            f"against another's peak; use {right}"
        )
    return known_peak(config, gpu, clusters)


def known_peak(config: RunConfig, gpu: str | None, clusters: Sequence[ClusterConfig]) -> float | None:
    """The dense peak of `gpu` in the run's precision, in TFLOP/s, by the run's cluster or by all `clusters`."""
    matching = [known for known in clusters if gpu is not None and is_gpu(known.gpu, gpu)]
    kind = _ARITHMETIC[config.precision.compute_dtype]
    kind = "tf32" if kind == "fp32" and config.precision.tf32 else kind
    peaks = [getattr(known.peak_tflops, kind) for known in [config.cluster, *matching]]
    return next((peak for peak in peaks if peak is not None), None)


def link_gb_per_second(cluster: ClusterConfig, nodes: int, devices: int, accelerator: str) -> float | None:
    """What one GPU can send to the other ranks: over NVLink, or its share of the node's network; None: not known."""
    if accelerator == "cpu":
        return None
    if nodes == 1:
        return cluster.nvlink_gb_per_second
    return None if cluster.network_gb_per_second is None else cluster.network_gb_per_second / devices


_ARITHMETIC = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_SLOWER_BOARDS = ("PCIE", "NVL")  # variants of a faster board of the same name


def is_amd(gpu: str | None) -> bool:
    """Whether a GPU of this name is one of AMD's."""
    return gpu is not None and re.search(r"\bMI\d{3}|\bAMD\b", gpu.upper()) is not None


def is_gpu(model: str | None, name: str) -> bool:
    """Whether a device of this `name` ("NVIDIA H100 80GB HBM3") is a `model` (H100), and no slower variant of it."""
    parts = re.split(r"[^A-Z0-9]+", name.upper())
    wanted = re.split(r"[^A-Z0-9]+", (model or "").upper())
    return set(wanted) <= set(parts) and not any(b in parts and b not in wanted for b in _SLOWER_BOARDS)
