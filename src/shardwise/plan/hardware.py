"""Which GPU this is, and how fast it computes at best."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from shardwise.config.groups import ClusterConfig
from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError
from shardwise.plan.plan import Host


def peak_tflops(config: RunConfig, host: Host, accelerator: str, clusters: Sequence[ClusterConfig]) -> float | None:
    for word, value in vars(config.cluster.peak_tflops).items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"cluster.peak_tflops.{word}={value}: must be above 0 and finite, or null")
    if accelerator == "cpu":
        return None
    cluster, gpu = config.cluster, host.gpu
    there = [known for known in clusters if gpu is not None and is_gpu(known.gpu, gpu)]
    if cluster.gpu is not None and gpu is not None and not is_gpu(cluster.gpu, gpu):
        right = " or ".join(f"cluster={known.name}" for known in [*there, ClusterConfig()])
        raise ConfigError(
            f"cluster={cluster.name} has {cluster.gpu} GPUs, and this machine has {gpu}: its speed would be held "
            f"against another's peak; use {right}"
        )
    kind = _ARITHMETIC[config.precision.compute_dtype.value]
    kind = "tf32" if kind == "fp32" and config.precision.tf32 else kind
    said = [getattr(known.peak_tflops, kind) for known in [cluster, *there]]
    return next((peak for peak in said if peak is not None), None)


_ARITHMETIC = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_SLOWER_BOARDS = ("PCIE", "NVL")  # the name of a faster one, with other clocks and fewer units


def is_gpu(word: str | None, name: str) -> bool:
    """Whether `word` (H100) is a word of a device's name ("NVIDIA H100 80GB HBM3") and the board is no slower one."""
    words = re.split(r"[^A-Z0-9]+", name.upper())
    wanted = re.split(r"[^A-Z0-9]+", (word or "").upper())
    return set(wanted) <= set(words) and not any(b in words and b not in wanted for b in _SLOWER_BOARDS)
