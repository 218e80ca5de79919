"""What a run computes on: the kind of device, its peak speed, whether fp8 works there, and which packages are
installed."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from shardwise.config.groups import ClusterConfig
from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError, count
from shardwise.plan.plan import Choice, Host, Plan

# Finds the peak speed of the GPU.


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


# Decides what a run computes on, and refuses what that kind of device cannot do.

AcceleratorName = Literal["cpu", "cuda"]
# What messages call it. "rocm" is `cuda` on AMD's GPUs.
WHERE = {"cpu": "the CPU", "cuda": "NVIDIA GPUs", "rocm": "AMD GPUs"}


def choose_accelerator(config: RunConfig, host: Host) -> AcceleratorName:
    """`auto` is the GPUs that this process sees, else the CPU.

    Raises:
        ConfigError: this machine has no device of the kind that the config names.
    """
    name: Literal["auto"] | AcceleratorName = config.accelerator
    if name == "auto":
        return "cuda" if host.cuda_devices else "cpu"
    if name == "cuda" and not host.cuda_devices:
        raise ConfigError("accelerator=cuda: this process sees 0 CUDA devices; use accelerator=cpu")
    return name


def vendor(accelerator: str, host: Host) -> str:
    """A key of `WHERE`."""
    return "rocm" if accelerator == "cuda" and host.rocm else accelerator


def check_devices(devices: int, nodes: int, accelerator: str, host: Host) -> None:
    """Raises: ConfigError: there are fewer devices than processes."""
    if accelerator != "cuda":
        return
    seen = host.cuda_devices
    if devices > seen and host.launcher == "slurm":
        raise ConfigError(
            f"srun started {count(devices, 'task')} a node, and each sees {seen} of its CUDA devices: give "
            f"--gpus-per-node={devices}, not --gpus-per-task, which hides a rank's GPUs from its peers"
        )
    if devices > seen:
        raise ConfigError(
            f"devices={devices} is more than the {count(seen, 'CUDA device')} that this process sees; use "
            f"devices={seen} or fewer, or accelerator=cpu"
        )


def check_accelerator(config: RunConfig, accelerator: str, host: Host) -> None:
    """Refuse what this kind of device cannot do. plan/kernel_choice.py and plan/kernel_choice.py know of kernels.

    Raises:
        ConfigError
    """
    kind, precision = vendor(accelerator, host), config.precision.name
    if config.precision.tf32 and kind != "cuda":
        raise ConfigError(
            f"precision={precision} needs CUDA on NVIDIA's GPUs: TensorFloat-32 is a mode of their tensor cores; "
            f"on {WHERE[kind]} use precision=fp32"
        )


# Decides whether the linear layers of a run multiply in fp8, and refuses that where it cannot work.

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


# What `loss=` and `attention=` have in common: a word of the user's, or what `auto` has become here.


def for_module(plan: Plan, word: str, takes_part: bool, otherwise: str) -> Plan:
    """The Plan for a module that may not let the run choose. `takes_part`: whether it has `choose_<word>`.

    `word`: "loss" or "attention". `otherwise`: the name of the choice for a module that does not take part.

    Raises:
        ConfigError: the user named a choice, and the module does not take part.
    """
    if takes_part:
        return plan
    choice: Choice = getattr(plan, f"chosen_{word}")
    why = f"{plan.module['_target_']} has no choose_{word}, so its {word} is its own"
    if not choice.reason:
        raise ConfigError(
            f"{word}={choice.name}: {why}; leave it out, or see recipes/README.md for how a module takes part"
        )
    changed: dict[str, Any] = {f"chosen_{word}": Choice(otherwise, why)}
    return dataclasses.replace(plan, **changed)


def arguments_of(module: Any) -> dict[str, Any]:
    """The arguments of the module in a config and those of its model, by which `auto` knows shapes."""
    own: dict[str, Any] = module if isinstance(module, dict) else {}
    model = own.get("model")
    return own | (model if isinstance(model, dict) else {})


def installed(package: str) -> str | None:
    """Its version, without importing it; None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
