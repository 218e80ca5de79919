"""The options of `cluster=`: what is known of the machine for a run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PeakTflopsConfig:
    """The peak of one GPU in 10^12 floating-point operations a second, for each dtype of matrix products.

    The peaks are dense, without 2:4 sparsity. They are those of tensor cores, except in fp32. None: not known.
    """

    bf16: float | None = None
    fp16: float | None = None
    tf32: float | None = None
    fp32: float | None = None
    fp64: float | None = None


@dataclass(frozen=True)
class ClusterConfig:
    """The machine for a run. `local` is this machine."""

    name: str = "local"
    devices_per_node: int | None = None
    gpu: str | None = None  # a part of the GPU's name, e.g. H200
    gpu_memory_gib: float | None = None  # the memory of one GPU as the driver counts it
    memory_gb_per_second: float | None = None  # between one GPU and its own memory
    nvlink_gb_per_second: float | None = None  # from one GPU, in one direction
    network_gb_per_second: float | None = None  # from one node, in one direction, by all adapters
    cpu_cores: int | None = None  # the cores of one node
    peak_tflops: PeakTflopsConfig = field(default_factory=PeakTflopsConfig)
    environment: dict[str, str] = field(default_factory=dict)  # variables for NCCL, set unless the user has set them
    # What `shardwise submit` says to Slurm, where its command line says nothing else
    sbatch: dict[str, str | int | bool | None] = field(default_factory=dict)  # options of sbatch, e.g. {account: mine}
    mounts: tuple[str, ...] = ()  # folders that a container sees: /data, or /data:/inside
    modules: tuple[str, ...] = ()  # environment modules, e.g. cuda/12.4
    prolog: str | None = None  # a line of shell, which the batch script runs as it stands
