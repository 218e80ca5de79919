"""The options of each group (`strategy=`, `precision=`, `guard.…` and so on). Each has one place: its field.

`--help` describes the field, every composed config has its default, its bound is checked when the Plan is made, and
ranks read it, resolved.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from shardwise.errors import ConfigError

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
PrecisionName = Literal["fp64", "fp32", "tf32", "bf16", "bf16_true", "fp16", "fp8"]


def option(
    default: Any, says: str, *, form: str = "", section: str = "", least: int | None = None, remedy: str = ""
) -> Any:
    """A field that `--help` describes.

    `says`: one sentence. `form`: what is written behind `=`, where its type does not tell. `section`: the headline that
    begins with this field. `least`: the smallest value; `remedy`: what the message about a smaller one adds.
    """
    metadata = {"says": says, "form": form, "section": section, "least": least, "remedy": remedy}
    return field(default=default, metadata=metadata)


_OFF: Any = False
_ON: Any = True
_ONE: Any = 1
_NONE: Any = None


@dataclass(frozen=True)
class StrategyConfig:
    """What every strategy has, and all that one without options of its own has."""

    name: str
    timeout_minutes: float = option(10.0, "a run that makes no progress for so many minutes is ended")

    # Options of some strategies, as all others have them
    find_unused_parameters = defer_gradient_sync = offload_optimizer = offload_parameters = symmetric_memory = _OFF
    reshard_after_forward = _ON
    pipeline_chunks, pipeline_split = _ONE, _NONE


_UNUSED = "weights may take no part in some steps"


@dataclass(frozen=True)
class DdpConfig(StrategyConfig):
    name: str = "ddp"
    find_unused_parameters: bool = option(False, _UNUSED)
    bucket_cap_mb: int = option(25, "MB of gradients that are reduced together", least=1)


@dataclass(frozen=True)
class FsdpConfig(StrategyConfig):
    name: str = "fsdp"
    reshard_after_forward: bool | int = option(
        True,
        "free a unit's gathered parameters after its forward pass; N: keep them sharded over groups of N ranks, and "
        "gather them from there in the backward pass",
        form="true|false|N",
    )
    defer_gradient_sync: bool = option(
        False, "reduce gradients once a step: less communication, but whole gradients are kept"
    )
    forward_prefetch_units: int | None = option(
        None,
        "all-gathers that a unit issues ahead in the forward pass; left out: FSDP2's own order",
        least=1,
        remedy=", or null for FSDP2's own order",
    )
    backward_prefetch_units: int | None = option(
        None,
        "the same in the backward pass; left out: FSDP2's own order, one ahead",
        least=1,
        remedy=", or null for FSDP2's own order",
    )
    symmetric_memory: bool | None = option(
        False, "GPUs of a node exchange by copies, not by NCCL; null: if they can", form="true|false|null"
    )
    tensor_parallel_size: int = option(1, "ranks of one node that share each layer's matrices: docs/parallelism.md")
    context_parallel_size: int = option(1, "ranks that share each sequence")
    context_parallel_method: Literal["auto", "heads", "keys"] | None = option(
        "auto",
        "how attention reaches positions of other ranks: heads exchanges positions for heads, keys gathers all keys "
        "and values; auto: heads where the ranks divide the key heads",
    )
    pipeline_parallel_size: int = option(1, "ranks that have different layers, and hand over what goes between them")
    pipeline_schedule: str = option(
        "1f1b",
        "gpipe: all forward passes of a step, then all backward passes; 1f1b: a backward pass as soon as there is one, "
        "for less memory; interleaved: 1f1b with several stages a rank, for less idle time",
        form="gpipe|1f1b|interleaved",
    )
    pipeline_chunks: int = option(1, "stages of a rank; above 1 with pipeline_schedule=interleaved")
    pipeline_split: tuple[int, ...] | None = option(
        None, "layers that repeat in each stage, in order; left out: cut by FLOPs, the head's counted", form="[N, …]"
    )


@dataclass(frozen=True)
class FsdpHybridConfig(FsdpConfig):
    name: str = "fsdp_hybrid"
    shard_size: int | None = option(
        None, "ranks that share one copy of the parameters; left out: the devices of one node"
    )


@dataclass(frozen=True)
class ZeroConfig(StrategyConfig):
    """What the three stages have in common. DeepSpeed counts elements of tensors, not bytes."""

    find_unused_parameters: bool = option(False, _UNUSED)
    offload_optimizer: bool = option(False, "optimizer state and its step on the CPU")
    reduce_bucket_elements: int = option(
        25_000_000, "gradients that are reduced together (reduce_bucket_size)", least=1
    )
    overlap_comm: bool = option(True, "on GPUs: reduce gradients beside the backward pass")


@dataclass(frozen=True)
class Zero1Config(ZeroConfig):
    name: str = "zero1"
    allgather_bucket_elements: int = option(
        25_000_000, "updated parameters that are gathered together (allgather_bucket_size)", least=2
    )


@dataclass(frozen=True)
class Zero2Config(Zero1Config):
    name: str = "zero2"


@dataclass(frozen=True)
class Zero3Config(ZeroConfig):
    name: str = "zero3"
    offload_parameters: bool = option(False, "shards wait on the CPU until they are gathered")
    prefetch_bucket_elements: int = option(
        50_000_000,
        "parameters that are gathered ahead of their layer (stage3_prefetch_bucket_size); 0: none",
        least=0,
        remedy="; 0 gathers nothing ahead",
    )
    persistence_threshold_elements: int = option(
        100_000,
        "a parameter of at most this size stays gathered (stage3_param_persistence_threshold)",
        least=0,
        remedy="; 0 shards every parameter",
    )
    max_live_elements: int = option(
        1_000_000_000,
        "nothing is gathered ahead beyond so many gathered parameters (stage3_max_live_parameters)",
        least=0,
        remedy="; 0 gathers nothing ahead",
    )
    max_reuse_distance_elements: int = option(
        1_000_000_000,
        "a parameter that is needed again this soon stays gathered (stage3_max_reuse_distance)",
        least=0,
        remedy="; 0 frees every parameter behind its layer",
    )
    sub_group_elements: int = option(
        1_000_000_000, "of a rank's shard, what one step of the optimizer updates at a time (sub_group_size)", least=1
    )


@dataclass(frozen=True)
class Float8Config:
    """Which linear layers multiply in fp8, and how."""

    recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    keep_in_bf16: tuple[str, ...] = ()  # layers by name; * stands for any text
    min_features: int = 512  # a layer with fewer inputs or outputs stays in bf16
    emulate: bool = False  # products in fp32 of what fp8 can hold: slow, on any device


@dataclass(frozen=True)
class PrecisionConfig:
    """The settings that a precision such as `bf16` stands for."""

    name: PrecisionName = "fp32"
    parameter_dtype: Dtype = "float32"  # the dtype of master weights and optimizer state
    compute_dtype: Dtype = "float32"  # the dtype in which layers compute
    reduce_dtype: Dtype = "float32"  # the dtype in which gradients are reduced between ranks
    loss_scaling: bool = False  # dynamic; a step whose gradients overflow is skipped
    tf32: bool = False  # matrix products of float32 tensors on tensor cores, 10-bit mantissa
    fp8: Float8Config | None = None  # linear layers multiply in fp8; null: none does

    @property
    def is_low(self) -> bool:
        """Whether layers compute in 16 bits."""
        return self.compute_dtype in ("bfloat16", "float16")

    @property
    def is_mixed(self) -> bool:
        """Whether layers compute on copies of the parameters in another dtype."""
        return self.compute_dtype != self.parameter_dtype


@dataclass(frozen=True)
class CompileConfig:
    """What torch.compile compiles, and how."""

    name: Literal["none", "layer", "model"] = "none"
    memory_budget: float | None = option(
        None, "keep this share of what the compiler would keep, and compute the rest in the backward pass", form="0…1"
    )  # fmt: skip
    recompute_elementwise: bool = option(False, "compute norms and elementwise operations again in the backward pass")
    mode: Literal["default", "max-autotune"] = option(
        "default", "max-autotune tries several kernels for each matrix product and takes the fastest"
    )
    cudagraphs: bool = option(False, "record the kernels and replay them, where the host is too slow to launch each")


# What `save` may name. parallel/activation_checkpointing.py says which operations of PyTorch these are.
SAVED = ("matmul", "every_second_matmul", "convolution", "attention", "collective", "fp8_maximum")


@dataclass(frozen=True)
class ActivationCheckpointingConfig:
    """What the backward pass computes again instead of keeping it from the forward pass."""

    name: Literal["none", "selective", "full"] = "none"
    every_n_layers: int = option(
        1, "of so many repeated layers one is checkpointed; the others keep everything", least=1
    )
    save: tuple[str, ...] = option(
        (),
        "what selective keeps: matmul, every_second_matmul, convolution, attention, collective, fp8_maximum, or "
        "operations of PyTorch by name, e.g. aten.mm",
        form="[matmul,attention,…]",
    )


@dataclass(frozen=True)
class CheckpointConfig:
    save_every_n_steps: int | None = option(
        100, "steps between two saves; null: at the end only", least=1, remedy=", or null to save at the end only"
    )
    save_every_n_epochs: int | None = option(
        None, "epochs between two saves, in place of steps", least=1, remedy=", or null to save at the end only"
    )
    keep_last: int = option(2, "so many of the newest checkpoints are kept", least=1)
    monitor: str | None = option(
        None, "a validation metric, whose best checkpoint is kept as well; null: no best one (default: validation/loss)"
    )
    mode: str | None = option(
        None, "min: the smallest value is the best; max: the largest; left out: min, for a loss", form="min|max"
    )
    save_at_end: bool = option(True, "save after the last step")
    keep_every_n_steps: int | None = option(None, "checkpoints at multiples of N steps are kept for good")
    asynchronous: bool | None = option(None, "write while training goes on; left out: on GPUs", form="true|false")
    when_busy: Literal["wait", "skip"] = option(
        "wait", "a save that is due while the last one is still being written waits, or is left out"
    )
    max_failures: int = option(3, "saves in a row that may fail; one more stops the run", least=0)

    @property
    def saves(self) -> bool:
        return self.save_at_end or self.save_every_n_steps is not None or self.save_every_n_epochs is not None


@dataclass(frozen=True)
class LoggerConfig:
    name: Literal["csv", "wandb", "tensorboard"] = "csv"
    project: str = option("shardwise", "W&B's project")
    entity: str | None = option(None, "W&B's team or user; left out: that of the key")
    mode: str = option(
        "auto", "W&B: auto is online with a key and a network, offline otherwise", form="auto|online|offline"
    )
    tags: tuple[str, ...] = option((), "tags of the run in W&B", form="[TEXT,…]")


@dataclass(frozen=True)
class GuardConfig:
    """What to do about a step whose loss or gradients are not finite, and about a loss that leaps."""

    on_nonfinite: Literal["stop", "skip"] = option("stop", "a loss or gradient that is not finite: docs/guard.md")
    on_spike: Literal["ignore", "warn", "skip", "rollback"] = option("warn", "a loss that leaps")
    max_in_a_row: int = option(3, "steps that may be skipped, or windows rolled back; one more stops the run", least=0)
    spike_z: float = option(8.0, "the robust z-score of a loss that leaps, against the 128 before it")


@dataclass(frozen=True)
class MetricsConfig:
    """What is measured beside the training, and who may look on."""

    telemetry: bool = option(
        True, "what GPUs and hosts report: power, clocks, temperatures, errors, activity: docs/telemetry.md"
    )
    telemetry_seconds: float = option(5.0, "between two looks at a GPU, by a thread that no step waits for")
    prometheus: Literal["none", "textfile", "http"] = option(
        "none", "give the run's numbers to Prometheus, by a file or a port"
    )
    prometheus_directory: str | None = option(
        None, "a folder of the site in which Prometheus, or its node exporter, looks for files of runs", form="DIR"
    )
    prometheus_address: str = option("127.0.0.1", "the address to listen on; 0.0.0.0: every one of rank 0's node")
    prometheus_port: int = option(0, "the port; 0: one that is free, which a file in the run's folder names")


@dataclass(frozen=True)
class ProfileConfig:
    """Which steps of a run are profiled, on which ranks, and with what."""

    start: int | None = option(
        None, "the first step that is profiled; the run's losses and weights stay the same to the bit", least=1
    )
    steps: int = option(1, "how many steps are profiled; one is usually enough", least=1)
    ranks: tuple[int, ...] | str = option((0,), "the ranks that are profiled, or all", form="[0]|all")
    stacks: bool = option(
        False, "names the line of Python behind each operation; the profiled steps become much slower"
    )
    memory: bool = option(False, "on CUDA: what holds memory over these steps, by category, with the largest blocks")
    tool: Literal["torch", "nsys", "ncu"] = option(
        "torch",
        "torch writes a trace and reads it; nsys and ncu put NVIDIA's profilers before it, ncu on one GPU alone",
    )

    def has(self, rank: int) -> bool:
        """Whether `rank` is profiled."""
        return self.ranks == "all" or rank in self.ranks


@dataclass(frozen=True)
class DebugConfig:
    """Options that find a mistake. Each makes a run slower."""

    sync: Literal["off", "warn", "error"] = option(
        "off", "on CUDA: warn of each operation that lets the host wait for the GPU in a step, or stop at it; "
        "costs little"
    )  # fmt: skip
    anomaly: bool = option(
        False, "which forward operation gave a gradient that is not finite; a step takes about twice as long, or longer"
    )
    launch_blocking: bool = option(
        False, "on CUDA: the host waits for every kernel, so that an error names its own line; several times slower"
    )
    nccl: Literal["off", "version", "warn", "info", "trace"] = option(
        "off", "what NCCL says, in a file for each rank in the run's logs/; info costs little after the start, "
        "trace a lot"
    )  # fmt: skip


def check_bounds(config: Any, prefix: str = "") -> None:
    """Check every number against the `least` of its field.

    Raises:
        ConfigError
    """
    for f in fields(config):
        value, least = getattr(config, f.name), f.metadata.get("least")
        if is_dataclass(value):
            check_bounds(value, f"{prefix}{f.name}.")
        elif least is not None and value is not None and value < least:
            raise ConfigError(f"{prefix}{f.name}={value}: must be at least {least}{f.metadata['remedy']}")


STRATEGY_CONFIGS: dict[str, type[StrategyConfig]] = {
    kind.name: kind for kind in (DdpConfig, FsdpConfig, FsdpHybridConfig, Zero1Config, Zero2Config, Zero3Config)
}


# The options of `cluster=`: what is known of the machine for a run.


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


# What files of conf/ begin with: `shardwise_options@_here_: NAME`
OPTIONS: dict[str, Any] = STRATEGY_CONFIGS | {
    "checkpoint": CheckpointConfig,
    "compile": CompileConfig,
    "logger": LoggerConfig,
    "activation_checkpointing": ActivationCheckpointingConfig,
}
