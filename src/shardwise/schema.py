"""The typed configuration: what a well-formed run is. Whether its values agree with each other is `plan`'s question.

Field names equal the YAML keys. Durations, sizes and counts carry their unit in the name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING


class Stage(Enum):
    fit = "fit"
    validate = "validate"
    test = "test"
    predict = "predict"


class Accelerator(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class StrategyName(Enum):
    ddp = "ddp"
    fsdp = "fsdp"
    fsdp_hybrid = "fsdp_hybrid"


class PrecisionName(Enum):
    fp64 = "fp64"
    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"


class Dtype(Enum):
    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"


class LoggerName(Enum):
    csv = "csv"
    wandb = "wandb"
    tensorboard = "tensorboard"


@dataclass
class DdpConfig:
    name: StrategyName = StrategyName.ddp
    find_unused_parameters: bool = False
    bucket_cap_mb: int = 25
    timeout_minutes: float = 30.0


@dataclass
class FsdpConfig:
    name: StrategyName = StrategyName.fsdp
    reshard_after_forward: bool = True
    defer_gradient_sync: bool = False
    timeout_minutes: float = 30.0


@dataclass
class FsdpHybridConfig(FsdpConfig):
    name: StrategyName = StrategyName.fsdp_hybrid
    shard_size: int | None = None  # ranks that share one copy of the parameters; None: the devices of one node


@dataclass
class PrecisionConfig:
    """What a word like `bf16` means, as data."""

    name: PrecisionName = PrecisionName.fp32
    parameter_dtype: Dtype = Dtype.float32  # master weights and optimizer state
    compute_dtype: Dtype = Dtype.float32  # layers
    reduce_dtype: Dtype = Dtype.float32  # gradients between ranks
    tf32: bool = False  # matrix products of float32 tensors on tensor cores, 10-bit mantissa


@dataclass
class CheckpointConfig:
    save_every_n_steps: int | None = 100
    keep_last: int = 2
    monitor: str | None = None  # a validation metric; its best checkpoint is kept as well
    mode: str = "min"


@dataclass
class LoggerConfig:
    name: LoggerName = LoggerName.csv
    project: str = "shardwise"
    entity: str | None = None
    mode: str = "auto"  # wandb: auto | online | offline
    tags: list[str] = field(default_factory=list)


@dataclass
class ClusterConfig:
    """The machine that a run is meant for. `local` takes what is there."""

    name: str = "local"
    devices_per_node: int | None = None


@dataclass
class RunConfig:
    """A whole run as the user wrote it. `recipe`, `model` and `data` end in the two nodes `module` and `data`."""

    stage: Stage = Stage.fit
    name: str | None = None
    runs_dir: str = "runs"
    resume: str | None = None
    dry_run: bool = False
    seed: int = 0

    accelerator: Accelerator = Accelerator.auto
    nodes: int | None = None
    devices: int | None = None
    micro_batch_size: int = MISSING
    global_batch_size: int = MISSING
    max_steps: int | None = None
    max_epochs: int | None = None
    max_samples: int | None = None

    gradient_clip_val: float | None = None
    log_every_n_steps: int = 10
    validate_every_n_steps: int | None = None
    max_validation_batches: int | None = None
    optimizer_override: bool = False
    units: list[str] | None = None

    model: Any = None  # what the recipe's module is built around; reaches the Plan as a part of `module`
    module: Any = MISSING
    data: Any = MISSING
    strategy: Any = MISSING
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    optimizer: Any = None
    schedule: Any = None
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


STRATEGY_CONFIGS: dict[StrategyName, type[DdpConfig] | type[FsdpConfig]] = {
    StrategyName.ddp: DdpConfig,
    StrategyName.fsdp: FsdpConfig,
    StrategyName.fsdp_hybrid: FsdpHybridConfig,
}
