"""Decides what a run computes on, and refuses what that kind of device cannot do."""

from __future__ import annotations

from typing import Literal

from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError, count
from shardwise.plan.plan import Host

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
    """Refuse what this kind of device cannot do. plan/loss.py and plan/attention_kernel.py know of kernels.

    Raises:
        ConfigError
    """
    kind, precision = vendor(accelerator, host), config.precision.name
    if config.precision.tf32 and kind != "cuda":
        raise ConfigError(
            f"precision={precision} needs CUDA on NVIDIA's GPUs: TensorFloat-32 is a mode of their tensor cores; "
            f"on {WHERE[kind]} use precision=fp32"
        )
