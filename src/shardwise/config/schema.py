"""The typed configuration: what a well-formed run is. Whether its values agree with each other is `plan`'s question.

Field names equal the YAML keys. Durations, sizes and counts carry their unit in the name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

MISSING: Any = "???"  # YAML's and OmegaConf's word for a value that somebody has yet to give


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
    zero1 = "zero1"
    zero2 = "zero2"
    zero3 = "zero3"


class PrecisionName(Enum):
    fp64 = "fp64"
    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"
    bf16_true = "bf16_true"
    fp16 = "fp16"


class Dtype(Enum):
    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Compile(Enum):
    none = "none"
    layer = "layer"
    model = "model"


class ActivationCheckpointing(Enum):
    none = "none"
    full = "full"


class ClipAlgorithm(Enum):
    norm = "norm"
    value = "value"


class OnNonfinite(Enum):
    stop = "stop"
    skip = "skip"


class OnSpike(Enum):
    ignore = "ignore"
    warn = "warn"
    skip = "skip"
    rollback = "rollback"


class LoggerName(Enum):
    csv = "csv"
    wandb = "wandb"
    tensorboard = "tensorboard"


class Profiler(Enum):
    none = "none"
    simple = "simple"
    advanced = "advanced"
    pytorch = "pytorch"


@dataclass
class DdpConfig:
    name: StrategyName = StrategyName.ddp
    find_unused_parameters: bool = False
    bucket_cap_mb: int = 25
    timeout_minutes: float = 10.0


@dataclass
class FsdpConfig:
    name: StrategyName = StrategyName.fsdp
    reshard_after_forward: bool = True
    defer_gradient_sync: bool = False
    timeout_minutes: float = 10.0


@dataclass
class FsdpHybridConfig(FsdpConfig):
    name: StrategyName = StrategyName.fsdp_hybrid
    shard_size: int | None = None  # ranks that share one copy of the parameters; None: the devices of one node


@dataclass
class Zero1Config:
    name: StrategyName = StrategyName.zero1
    find_unused_parameters: bool = False
    offload_optimizer: bool = False
    timeout_minutes: float = 10.0


@dataclass
class Zero2Config(Zero1Config):
    name: StrategyName = StrategyName.zero2


@dataclass
class Zero3Config(Zero1Config):
    name: StrategyName = StrategyName.zero3
    offload_parameters: bool = False


@dataclass
class PrecisionConfig:
    """What a word like `bf16` means, as data."""

    name: PrecisionName = PrecisionName.fp32
    parameter_dtype: Dtype = Dtype.float32  # master weights and optimizer state
    compute_dtype: Dtype = Dtype.float32  # layers
    reduce_dtype: Dtype = Dtype.float32  # gradients between ranks
    loss_scaling: bool = False  # dynamic; a step whose gradients overflow is skipped
    tf32: bool = False  # matrix products of float32 tensors on tensor cores, 10-bit mantissa


class WhenBusy(Enum):
    """What a save does that comes while the one before is still being written."""

    wait = "wait"
    skip = "skip"


@dataclass
class CheckpointConfig:
    save_every_n_steps: int | None = 100
    keep_last: int = 2
    monitor: str | None = None  # a validation metric; its best checkpoint is kept as well
    mode: str = "min"
    save_at_end: bool = True
    keep_every_n_steps: int | None = None  # of those that are saved, these are kept for good
    asynchronous: bool | None = None  # written beside the training; null: on GPUs
    when_busy: WhenBusy = WhenBusy.wait
    max_failures: int = 3  # saves in a row that may fail; one more stops the run


@dataclass
class GuardConfig:
    """What to do about a step whose loss or gradients are not finite, and about a loss that leaps."""

    on_nonfinite: OnNonfinite = OnNonfinite.stop
    on_spike: OnSpike = OnSpike.warn
    max_in_a_row: int = 3  # steps passed over, or windows rolled back; one more stops the run
    spike_z: float = 8.0  # robust z-score of the loss against the 128 before it


@dataclass
class LoggerConfig:
    name: LoggerName = LoggerName.csv
    project: str = "shardwise"
    entity: str | None = None
    mode: str = "auto"  # wandb: auto | online | offline
    tags: list[str] = field(default_factory=list)


@dataclass
class PeakTflopsConfig:
    """Peaks of one GPU in 10^12 floating-point operations a second, by the arithmetic of matrix products: dense, not
    with 2:4 sparsity; tensor cores where they take part, so not in fp32. None: not known."""

    bf16: float | None = None
    fp16: float | None = None
    tf32: float | None = None
    fp32: float | None = None
    fp64: float | None = None


@dataclass
class ClusterConfig:
    """The machine that a run is meant for. `local` takes what is there."""

    name: str = "local"
    devices_per_node: int | None = None
    gpu: str | None = None  # a word of the GPU's name, e.g. H200
    gpu_memory_gib: float | None = None  # of one GPU, as the driver counts it
    nvlink_gb_per_second: float | None = None  # of one GPU, in one direction
    network_gb_per_second: float | None = None  # of one node to the others, in one direction: all its adapters
    cpu_cores: int | None = None  # of one node
    peak_tflops: PeakTflopsConfig = field(default_factory=PeakTflopsConfig)
    environment: dict[str, str] = field(default_factory=dict)  # NCCL's, exported where the user has not set it


@dataclass
class RunConfig:
    """A whole run as the user wrote it. `recipe`, `model` and `data` end in the two nodes `module` and `data`."""

    stage: Stage = Stage.fit
    name: str | None = None
    runs_dir: str = "runs"
    resume: str | None = None
    resume_allow: list[str] = field(default_factory=list)  # what may be another than in the run that is resumed
    trust: bool = False  # read what a checkpoint holds as a pickle, which may run any code
    init_from: str | None = None  # safetensors to start from, instead of the seed's weights
    dry_run: bool = False
    preflight: bool | None = None  # look the machines over before the run; None: under Slurm, on more than one node
    exclude_bad_nodes: bool = True  # a job whose preflight finds some goes back to the queue without them
    seed: int = 0

    accelerator: Accelerator = Accelerator.auto
    nodes: int | None = None
    devices: int | None = None
    micro_batch_size: int = MISSING
    global_batch_size: int = MISSING
    max_steps: int | None = None
    max_epochs: int | None = None
    max_samples: int | None = None

    min_steps: int | None = None  # an early stop waits for them
    min_epochs: int | None = None

    max_train_batches: int | None = None  # micro-batches of one rank in an epoch
    quick_check: bool = False  # a few batches of every stage; nothing is kept
    find_learning_rate: bool = False  # steps with ever larger learning rates, instead of the run
    profiler: Profiler = Profiler.none

    gradient_clip_val: float | None = None
    gradient_clip_algorithm: ClipAlgorithm = ClipAlgorithm.norm
    log_every_n_steps: int = 10
    validate_every_n_steps: int | None = None
    max_validation_batches: int | None = None  # of all ranks; 0: no validation
    progress_bar: bool | None = None  # instead of lines; None: in a terminal
    optimizer_override: bool = False
    deterministic: bool = False
    benchmark: bool = False  # cuDNN tries its algorithms for each shape and takes the fastest
    detect_anomaly: bool = False  # torch.autograd's: which forward operation gave a gradient that is not finite
    compile: Compile = Compile.none
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.none
    ema_decay: float | None = None
    memory_history: bool = False
    max_restarts: int = 0
    units: list[str] | None = None

    model: Any = None  # what the recipe's module is built around; reaches the Plan as a part of `module`
    module: Any = MISSING
    data: Any = MISSING
    strategy: Any = MISSING
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    optimizer: Any = None
    schedule: Any = None
    loggers: dict[str, Any] = field(default_factory=dict)  # trackers of the user's own, each a node with a `_target_`
    callbacks: dict[str, Any] = field(default_factory=dict)  # of the user's own, each a node with a `_target_`
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


StrategyConfig = DdpConfig | FsdpConfig | Zero1Config

STRATEGY_CONFIGS: dict[StrategyName, type[StrategyConfig]] = {
    StrategyName.ddp: DdpConfig,
    StrategyName.fsdp: FsdpConfig,
    StrategyName.fsdp_hybrid: FsdpHybridConfig,
    StrategyName.zero1: Zero1Config,
    StrategyName.zero2: Zero2Config,
    StrategyName.zero3: Zero3Config,
}
