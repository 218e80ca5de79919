"""Decides whether the linear layers of a run multiply in fp8, and refuses that where it cannot work."""

from __future__ import annotations

from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError
from shardwise.plan.accelerator import WHERE, vendor
from shardwise.plan.hardware import is_gpu
from shardwise.plan.plan import Host

# Usual names of layers that stay in bf16 (conf/precision/fp8.yaml): no model has all of them
USUAL = ("head", "lm_head", "heads", "output", "classifier", "fc", "router", "gate")

_OLDEST = (8, 9)  # the compute capability of Ada, the first whose tensor cores multiply in fp8
_OLDER = ("A100", "A40", "A30", "A10", "V100", "T4")  # on a login node a cluster's file gives the GPU's name alone


def check_float8(config: RunConfig, host: Host, accelerator: str) -> None:
    """Raises ConfigError: the device or another dtype rules fp8 out."""
    name, fp8 = config.precision.name, config.precision.fp8
    if (name == "fp8") != (fp8 is not None):
        raise ConfigError(f"precision={name} precision.fp8={'null' if fp8 is None else '{…}'}: use precision=fp8 for "
                          f"products in fp8, and leave precision.fp8 out elsewhere")  # fmt: skip
    if fp8 is None:
        return
    dtypes = config.precision.parameter_dtype, config.precision.compute_dtype
    if dtypes != ("float32", "bfloat16"):
        raise ConfigError(
            f"precision=fp8 precision.parameter_dtype={dtypes[0]} precision.compute_dtype={dtypes[1]}: fp8 keeps "
            f"weights in float32, and what is not in fp8 in bfloat16; leave both out"
        )
    if fp8.min_features < 1:
        raise ConfigError(f"precision.fp8.min_features={fp8.min_features}: must be at least 1")
    if not fp8.emulate:
        _check_device(host, accelerator)


def _check_device(host: Host, accelerator: str) -> None:
    if (kind := vendor(accelerator, host)) != "cuda":
        raise ConfigError(
            f"precision=fp8 needs a GPU whose tensor cores multiply in fp8 (Ada, Hopper or newer); on {WHERE[kind]} "
            f"use precision=bf16, or precision.fp8.emulate=true to try out fp8's rounding, slowly"
        )
    found = host.gpu_capability
    if any(is_gpu(older, host.gpu or "") for older in _OLDER) if found is None else found < _OLDEST:
        has = "" if found is None else f", which has {found[0]}.{found[1]}"
        raise ConfigError(
            f"precision=fp8 needs compute capability {_OLDEST[0]}.{_OLDEST[1]} or more (Ada, Hopper or newer), and the "
            f"GPU is {host.gpu or 'an older one'}{has}; use precision=bf16"
        )
