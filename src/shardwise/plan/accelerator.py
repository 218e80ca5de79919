"""Decides what a run computes on, and refuses what that kind of device cannot do."""

from __future__ import annotations

from typing import Literal

from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError, count
from shardwise.plan.plan import Host

AcceleratorName = Literal["cpu", "cuda", "xpu", "mps"]
# What messages call it. "rocm" is `cuda` on AMD's GPUs.
WHERE = {"cpu": "the CPU", "cuda": "NVIDIA GPUs", "rocm": "AMD GPUs", "xpu": "Intel GPUs", "mps": "an Apple GPU"}
_BF16_SINCE = 14  # macOS


def choose_accelerator(config: RunConfig, host: Host) -> AcceleratorName:
    """`auto` is the GPUs that this process sees, else the CPU.

    Raises:
        ConfigError: this machine has no device of the kind that the config names.
    """
    name: Literal["auto"] | AcceleratorName = config.accelerator.value
    if name == "auto":
        return "cuda" if host.cuda_devices else "xpu" if host.xpu_devices else "cpu" if host.macos is None else "mps"
    if name == "cuda" and not host.cuda_devices:
        raise ConfigError("accelerator=cuda: this process sees 0 CUDA devices; use accelerator=cpu")
    if name == "xpu" and not host.xpu_devices:
        raise ConfigError(
            "accelerator=xpu: this process sees no Intel GPU that the installed torch can use; install torch from "
            "https://download.pytorch.org/whl/xpu, or use accelerator=cpu"
        )
    if name == "mps" and host.macos is None:
        raise ConfigError(
            "accelerator=mps is the GPU of a Mac with Apple silicon, and this is none; use accelerator=cpu"
        )
    return name


def vendor(accelerator: str, host: Host) -> str:
    """A key of `WHERE`."""
    return "rocm" if accelerator == "cuda" and host.rocm else accelerator


def check_devices(devices: int, nodes: int, accelerator: str, host: Host) -> None:
    """Raises: ConfigError: there are fewer devices than processes."""
    if accelerator == "mps" and devices * nodes > 1:
        raise ConfigError(
            f"accelerator=mps devices={devices} nodes={nodes}: a Mac has one GPU, and processes on it cannot exchange "
            f"gradients; use devices=1 nodes=1, or accelerator=cpu"
        )
    if accelerator not in ("cuda", "xpu"):
        return
    seen, word = (host.cuda_devices, "CUDA device") if accelerator == "cuda" else (host.xpu_devices, "Intel GPU")
    if devices > seen and host.launcher == "slurm":
        raise ConfigError(
            f"srun started {count(devices, 'task')} a node, and each sees {seen} of its {word}s: give "
            f"--gpus-per-node={devices}, not --gpus-per-task, which hides a rank's GPUs from its peers"
        )
    if devices > seen:
        raise ConfigError(
            f"devices={devices} is more than the {count(seen, word)} that this process sees; use devices={seen} or "
            f"fewer, or accelerator=cpu"
        )


def check_accelerator(config: RunConfig, accelerator: str, host: Host) -> None:
    """Refuse what this kind of device cannot do. plan/loss.py and plan/attention_kernel.py know of kernels.

    Raises:
        ConfigError
    """
    kind, precision = vendor(accelerator, host), config.precision.name.value
    if kind in ("xpu", "mps") and config.preflight:
        raise ConfigError(f"preflight=true accelerator={kind}: it knows NVIDIA's GPUs and the CPU; leave it out")
    if config.precision.tf32 and kind != "cuda":
        raise ConfigError(
            f"precision={precision} needs CUDA on NVIDIA's GPUs: TensorFloat-32 is a mode of their tensor cores; "
            f"on {WHERE[kind]} use precision=fp32"
        )
    if kind == "mps":
        _check_apple(config, host, precision)


def _check_apple(config: RunConfig, host: Host, precision: str) -> None:
    dtypes = {config.precision.parameter_dtype.value, config.precision.compute_dtype.value}
    if "float64" in dtypes:
        raise ConfigError(f"precision={precision} accelerator=mps: Apple's GPUs have no float64; use precision=fp32 "
                          f"or accelerator=cpu")  # fmt: skip
    if "float16" in dtypes:
        raise ConfigError(f"precision={precision} accelerator=mps: torch's loss scale takes float64, which Apple's "
                          f"GPUs do not have; use precision=bf16")  # fmt: skip
    if config.precision.fp8 is not None:
        raise ConfigError(f"precision={precision} accelerator=mps: Apple's GPUs have no fp8; use precision=bf16")
    if "bfloat16" in dtypes and 0 < (host.macos or 0) < _BF16_SINCE:
        raise ConfigError(f"precision={precision} accelerator=mps: bfloat16 needs macOS {_BF16_SINCE}, and this is "
                          f"macOS {host.macos}; use precision=fp32")  # fmt: skip
