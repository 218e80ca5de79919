"""The options of each group (`strategy=`, `precision=` and so on). The files in conf/ have their defaults, too."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


def option(default: Any, says: str, *, form: str = "", section: str = "") -> Any:
    """A field that `--help` describes.

    `says`: one sentence. `form`: what is written behind `=`, where its type does not tell. `section`: the headline that
    begins with this field.
    """
    metadata = {"says": says, "form": form, "section": section}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


_UNUSED = "weights may take no part in some steps"
_TIMEOUT = "a run that makes no progress for so many minutes is ended"


class PrecisionName(Enum):
    fp64 = "fp64"
    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"
    bf16_true = "bf16_true"
    fp16 = "fp16"
    fp8 = "fp8"


class CompileName(Enum):
    none = "none"
    layer = "layer"
    model = "model"


# torch.compile's own words, one of which has a hyphen.
CompileMode = Enum("CompileMode", {"default": "default", "max-autotune": "max-autotune"})


class ActivationCheckpointingName(Enum):
    none = "none"
    selective = "selective"
    full = "full"


class Dtype(Enum):
    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class ContextParallelMethod(Enum):
    auto = "auto"
    heads = "heads"
    keys = "keys"


class LoggerName(Enum):
    csv = "csv"
    wandb = "wandb"
    tensorboard = "tensorboard"


@dataclass
class DdpConfig:
    name: str = "ddp"
    find_unused_parameters: bool = option(False, _UNUSED)
    bucket_cap_mb: int = option(25, "MB of gradients that are reduced together")
    timeout_minutes: float = option(10.0, _TIMEOUT)


@dataclass
class FsdpConfig:
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
        None, "all-gathers that a unit issues ahead in the forward pass; left out: FSDP2's own order"
    )
    backward_prefetch_units: int | None = option(
        None, "the same in the backward pass; left out: FSDP2's own order, one ahead"
    )
    symmetric_memory: bool | None = option(
        False, "GPUs of a node exchange by copies, not by NCCL; null: if they can", form="true|false|null"
    )
    tensor_parallel_size: int = option(1, "ranks of one node that share each layer's matrices: docs/parallelism.md")
    context_parallel_size: int = option(1, "ranks that share each sequence")
    context_parallel_method: ContextParallelMethod = option(
        ContextParallelMethod.auto,
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
    pipeline_split: list[int] | None = option(
        None, "layers that repeat in each stage, in order; left out: cut by FLOPs, the head's counted", form="[N, …]"
    )
    timeout_minutes: float = option(10.0, _TIMEOUT)


@dataclass
class FsdpHybridConfig(FsdpConfig):
    name: str = "fsdp_hybrid"
    shard_size: int | None = option(
        None, "ranks that share one copy of the parameters; left out: the devices of one node"
    )


@dataclass
class ZeroConfig:
    """What the three stages have in common. DeepSpeed counts elements of tensors, not bytes."""

    name: str
    find_unused_parameters: bool = option(False, _UNUSED)
    offload_optimizer: bool = option(False, "optimizer state and its step on the CPU")
    reduce_bucket_elements: int = option(25_000_000, "gradients that are reduced together (reduce_bucket_size)")
    overlap_comm: bool = option(True, "on GPUs: reduce gradients beside the backward pass")
    timeout_minutes: float = option(10.0, _TIMEOUT)


@dataclass
class Zero1Config(ZeroConfig):
    name: str = "zero1"
    allgather_bucket_elements: int = option(
        25_000_000, "updated parameters that are gathered together (allgather_bucket_size)"
    )


@dataclass
class Zero2Config(Zero1Config):
    name: str = "zero2"


@dataclass
class Zero3Config(ZeroConfig):
    name: str = "zero3"
    offload_parameters: bool = option(False, "shards wait on the CPU until they are gathered")
    prefetch_bucket_elements: int = option(
        50_000_000, "parameters that are gathered ahead of their layer (stage3_prefetch_bucket_size); 0: none"
    )
    persistence_threshold_elements: int = option(
        100_000, "a parameter of at most this size stays gathered (stage3_param_persistence_threshold)"
    )
    max_live_elements: int = option(
        1_000_000_000, "nothing is gathered ahead beyond so many gathered parameters (stage3_max_live_parameters)"
    )
    max_reuse_distance_elements: int = option(
        1_000_000_000, "a parameter that is needed again this soon stays gathered (stage3_max_reuse_distance)"
    )
    sub_group_elements: int = option(
        1_000_000_000, "of a rank's shard, what one step of the optimizer updates at a time (sub_group_size)"
    )


class Float8Recipe(Enum):
    """How many scales a matrix has that is cast to fp8."""

    tensorwise = "tensorwise"
    rowwise = "rowwise"


@dataclass
class Float8Config:
    """Which linear layers multiply in fp8, and how."""

    recipe: Float8Recipe = Float8Recipe.tensorwise
    keep_in_bf16: list[str] = field(default_factory=list)  # layers by name; * stands for any text
    min_features: int = 512  # a layer with fewer inputs or outputs stays in bf16
    emulate: bool = False  # products in fp32 of what fp8 can hold: slow, on any device


@dataclass
class PrecisionConfig:
    """The settings that a precision such as `bf16` stands for."""

    name: PrecisionName = PrecisionName.fp32
    parameter_dtype: Dtype = Dtype.float32  # the dtype of master weights and optimizer state
    compute_dtype: Dtype = Dtype.float32  # the dtype in which layers compute
    reduce_dtype: Dtype = Dtype.float32  # the dtype in which gradients are reduced between ranks
    loss_scaling: bool = False  # dynamic; a step whose gradients overflow is skipped
    tf32: bool = False  # matrix products of float32 tensors on tensor cores, 10-bit mantissa
    fp8: Float8Config | None = None  # linear layers multiply in fp8; null: none does


@dataclass
class CompileConfig:
    """What torch.compile compiles, and how."""

    name: CompileName = CompileName.none
    memory_budget: float | None = option(
        None, "keep this share of what the compiler would keep, and compute the rest in the backward pass", form="0…1"
    )  # fmt: skip
    recompute_elementwise: bool = option(False, "compute norms and elementwise operations again in the backward pass")
    mode: CompileMode = option(
        CompileMode.default, "max-autotune tries several kernels for each matrix product and takes the fastest"
    )
    cudagraphs: bool = option(False, "record the kernels and replay them, where the host is too slow to launch each")


@dataclass
class ActivationCheckpointingConfig:
    """What the backward pass computes again instead of keeping it from the forward pass."""

    name: ActivationCheckpointingName = ActivationCheckpointingName.none
    every_n_layers: int = option(1, "of so many repeated layers one is checkpointed; the others keep everything")
    save: list[str] = option(
        [], "what selective keeps: matmul, every_second_matmul, convolution, attention, collective, fp8_maximum, or "
        "operations of PyTorch by name, e.g. aten.mm", form="[matmul,attention,…]",
    )  # fmt: skip


class WhenBusy(Enum):
    """What happens to a save while the last one is still being written."""

    wait = "wait"
    skip = "skip"


@dataclass
class CheckpointConfig:
    save_every_n_steps: int | None = option(100, "steps between two saves; null: at the end only")
    save_every_n_epochs: int | None = option(None, "epochs between two saves, in place of steps")
    keep_last: int = option(2, "so many of the newest checkpoints are kept")
    monitor: str | None = option(
        None, "a validation metric, whose best checkpoint is kept as well; null: no best one (default: validation/loss)"
    )
    mode: str | None = option(
        None, "min: the smallest value is the best; max: the largest; left out: min, for a loss", form="min|max"
    )
    save_at_end: bool = option(True, "save after the last step")
    keep_every_n_steps: int | None = option(None, "checkpoints at multiples of N steps are kept for good")
    asynchronous: bool | None = option(None, "write while training goes on; left out: on GPUs", form="true|false")
    when_busy: WhenBusy = option(
        WhenBusy.wait, "a save that is due while the last one is still being written waits, or is left out"
    )
    max_failures: int = option(3, "saves in a row that may fail; one more stops the run")


@dataclass
class LoggerConfig:
    name: LoggerName = LoggerName.csv
    project: str = option("shardwise", "W&B's project")
    entity: str | None = option(None, "W&B's team or user; left out: that of the key")
    mode: str = option(
        "auto", "W&B: auto is online with a key and a network, offline otherwise", form="auto|online|offline"
    )
    tags: list[str] = option([], "tags of the run in W&B", form="[TEXT,…]")


@dataclass
class PlainConfig:
    """A strategy without options of its own."""

    name: str
    timeout_minutes: float = option(10.0, _TIMEOUT)


StrategyConfig = DdpConfig | FsdpConfig | ZeroConfig | PlainConfig
STRATEGY_CONFIGS: dict[str, type[StrategyConfig]] = {
    kind.name: kind for kind in (DdpConfig, FsdpConfig, FsdpHybridConfig, Zero1Config, Zero2Config, Zero3Config)
}
