"""The typed configuration: what a well-formed run is. Whether its values agree with each other is `plan`'s question.

Field names equal the YAML keys. Durations, sizes and counts carry their unit in the name. An option of the whole run is
described once, at its field: `--help` is made from that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from shardwise.config.groups import (
    ActivationCheckpointingConfig,
    CheckpointConfig,
    ClusterConfig,
    CompileConfig,
    DebugConfig,
    GuardConfig,
    LoggerConfig,
    MetricsConfig,
    PrecisionConfig,
    ProfileConfig,
    option,
)
from shardwise.errors import ConfigError, did_you_mean

MISSING: Any = "???"  # YAML's and OmegaConf's word for a value that somebody has yet to give


Stage = Literal["fit", "validate", "test", "predict"]
AttentionKernel = Literal["auto", "cudnn", "flash", "efficient", "math", "flex", "fa4"]


@dataclass(frozen=True)
class RunConfig:
    """A whole run as the user wrote it. `recipe`, `model` and `data` end in the two nodes `module` and `data`."""

    stage: Stage = option("fit", "train, or measure and use what was trained", section="The run")
    name: str | None = option(None, "the run's folder under runs_dir; made up when left out", form="NAME")
    runs_dir: str = option("runs", "the folder of all runs", form="DIR")
    resume: str | None = option(
        None,
        "the newest checkpoint of this name (from the seed if there is none), its best one (with stage=validate, test "
        "or predict), or the checkpoint at PATH",
        form="auto|best|PATH",
    )
    resume_allow: tuple[str, ...] = option(
        (), "what may be another there: data, global_batch_size, optimizer, seed, tokenizer", form="[seed,…]"
    )
    trust: bool = option(
        False, "read what a checkpoint holds as a pickle, which may run any code: docs/checkpointing.md"
    )
    init_from: str | None = option(
        None,
        "start from the weights of a .safetensors file, of a folder of them, of a run (its newest checkpoint), or of a "
        "checkpoint",
        form="PATH",
    )
    freeze: tuple[str, ...] | str = option(
        (),
        "parts of the module that are not trained, by name; backbone: all but its head: docs/checkpointing.md",
        form="NAME|[NAME,…]",
    )
    freeze_epochs: int | None = option(
        None,
        "they are trained after so many epochs; left out: never",
        least=1,
        remedy=", or null to freeze for the whole run",
    )
    seed: int = option(0, "of initial weights, of the order of samples, and of every random number")
    dry_run: bool = option(False, "print config and Plan, start nothing; also for nodes and GPUs that are not here")
    quick_check: bool = option(False, "a few batches of every stage, to see whether they run; nothing is kept")
    find_learning_rate: bool = option(
        False, "100 steps with ever larger learning rates: which to start with, and a picture; instead of the run"
    )

    accelerator: Literal["auto", "cpu", "cuda"] = option(
        "auto",
        "auto: GPUs where there are any; cuda: NVIDIA, or AMD with torch's ROCm build",
        section="Machines",
    )
    nodes: int | None = option(None, "machines; under srun and torchrun they are known")
    devices: int | None = option(None, "processes a node, one a GPU; under srun and torchrun they are known")
    preflight: bool | None = option(
        None, "look the machines over first (docs/preflight.md); left out: Slurm jobs on several nodes do"
    )
    exclude_bad_nodes: bool = option(
        True, "a Slurm job whose preflight finds bad nodes goes back to the queue without them"
    )
    max_restarts: int = option(
        0,
        "how often a run that crashed or hung is started again from its last checkpoint, without a new command",
        least=0,
    )

    micro_batch_size: int = option(
        MISSING, "samples per data-parallel rank per forward pass", section="Batches and length", least=1
    )
    global_batch_size: int = option(
        MISSING, "samples per optimizer step over all ranks: a multiple of micro_batch_size * ranks", least=1
    )
    max_steps: int | None = option(None, "a step is an optimizer step; of the three max_… exactly one is given")
    max_epochs: int | None = option(None, "passes over the training data")
    max_samples: int | None = option(None, "samples of all ranks: a multiple of global_batch_size")
    min_steps: int | None = option(None, "an early stop waits for them", least=1, remedy=", or null")
    min_epochs: int | None = option(None, "an early stop waits for them", least=1, remedy=", or null")
    max_train_batches: int | None = option(
        None, "an epoch has so many micro-batches of each rank, in whole steps; left out: the whole training set"
    )

    gradient_clip_val: float | None = option(None, "bound on the gradients", section="Steps")
    gradient_clip_algorithm: Literal["norm", "value"] = option(
        "norm", "norm bounds the norm of all gradients together, value bounds each element"
    )
    ema_decay: float | None = option(
        None, "keep an exponential moving average of the weights, and validate with it: 0.999, say"
    )
    optimizer_override: bool = option(False, "optimizer= overrules the module's own configure_optimizers")

    log_every_n_steps: int = option(10, "steps between two rows of numbers", section="Log and validation", least=1)
    validate_every_n_steps: int | None = option(
        None, "steps between validations; left out: after each epoch", least=1, remedy=", or null"
    )
    validate_every_n_epochs: int | None = option(
        None, "epochs between validations, in place of steps", least=1, remedy=", or null"
    )
    max_validation_batches: int | None = option(
        None, "of all ranks together; left out: every one; 0: no validation, and so no best checkpoint"
    )
    progress_bar: bool | None = option(None, "a bar, or lines; left out: a bar in a terminal")
    profiler: Literal["none", "simple", "advanced", "pytorch"] = option(
        "none",
        "Lightning's report of rank 0, pytorch's of three steps; profile.start=N says where the time of a step goes",
    )

    compile: CompileConfig = field(default_factory=CompileConfig)
    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    loss: Literal["auto", "full", "chunked", "fused"] = option(
        "auto",
        "a language model's loss from all logits at once, or from some rows at a time: docs/large-models.md",
        section="Speed, memory and numerics",
    )
    attention: AttentionKernel = option(
        "auto",
        "what computes attention: auto is FlashAttention 4 where it is installed and can run, else torch's choice; "
        "docs/large-models.md",
    )
    units: tuple[str, ...] | None = option(
        None, "the repeated layers by their classes, where they are not found", form="[ClassName,…]"
    )
    whole_weights_in: tuple[str, ...] | None = option(
        None,
        "hooks in which strategies that shard weights make them whole; left out: those of a run, an epoch, a "
        "validation and a checkpoint; docs/checkpointing.md",
        form="[on_train_batch_end,…]",
    )
    gc_every_n_steps: int | None = option(
        100,
        "steps between two full collections of Python's garbage, on all ranks at once; null: when Python likes",
        least=1,
        remedy=", or null",
    )
    memory_history: bool = option(
        False, "on CUDA: the snapshot of a rank that runs out of memory says what allocated each block"
    )
    cudnn_benchmark: bool = option(False, "cuDNN tries its algorithms for each new shape and takes the fastest")
    deterministic: bool = option(
        False, "the same bits in every run on the same GPUs, at some cost; an operation that cannot is an error"
    )

    model: Any = None  # what the recipe's module is built around; reaches the Plan as a part of `module`
    module: Any = MISSING
    data: Any = MISSING
    strategy: Any = MISSING
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    optimizer: Any = None
    schedule: Any = None
    loggers: dict[str, Any] = field(default_factory=dict)  # the user's own trackers, each a node with a `_target_`
    callbacks: dict[str, Any] = field(default_factory=dict)  # the user's own, each a node with a `_target_`
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


# Checks values from YAML or a command line, and puts them into the dataclasses above.

_TAKES = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text", tuple: "a list, e.g. [a,b]",
    dict: "a mapping, e.g. {A: b}",
}  # fmt: skip


def bind(kind: Any, value: Any, key: str = "") -> Any:
    """Convert a plain value from YAML to the schema's type `kind`. Nothing is rounded, cut or dropped.

    Raises:
        ConfigError: a value of another type or that is no choice, an unknown key, or a key without a value.
    """
    if kind is Any:
        return value
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    or_null = NoneType in kinds
    if or_null and value is None:
        return None
    kind, *others = (k for k in kinds if k is not NoneType)
    if type(value) in others:
        return value
    if dataclasses.is_dataclass(kind):
        return _bind_fields(cast(type[Any], kind), value, key)
    if get_origin(kind) is Literal:
        return choose(get_args(kind), value, key)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[choose(list(kind.__members__), value, key)]
    if get_origin(kind) is tuple and isinstance(value, (list, tuple)):
        return tuple(bind(get_args(kind)[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    if get_origin(kind) is dict and isinstance(value, dict):
        return {str(word): bind(get_args(kind)[1], item, f"{key}.{word}") for word, item in value.items()}
    if kind in (int, float) and isinstance(value, str):  # environment variables are text
        try:
            return kind(value)
        except ValueError:
            pass
    if type(value) is kind:
        return value
    if type(value) is int and kind in (float, str):
        return kind(value)
    kind = get_origin(kind) or kind
    remedy = ", or null" if or_null else ""
    if kind is int and isinstance(value, float) and value.is_integer():
        remedy = f"; write {int(value)}"
    elif kind is str and isinstance(value, (float, bool)):
        remedy = f"; quote it: \"{key}='…'\""
    elif kind is tuple:
        remedy += remedy_for_text(value)
    raise ConfigError(f"{key}={as_yaml(value)}: must be {', or '.join(_TAKES[k] for k in (kind, *others))}{remedy}")


def choose(choices: Collection[str], value: Any, key: str) -> str:
    """`value`, if it is one of `choices`."""
    if value is False and "off" in choices:  # so YAML reads `off`
        value = "off"
    if isinstance(value, str) and value in choices:
        return value
    raise ConfigError(f"{key}={as_yaml(value)}: must be one of {', '.join(choices)}{did_you_mean(str(value), choices)}")


def _bind_fields(kind: type[Any], value: Any, key: str) -> Any:
    prefix = f"{key}." if key else ""
    types = get_type_hints(kind)
    if not isinstance(value, dict):
        raise ConfigError(f"{key}={as_yaml(value)}: must be a mapping with {', '.join(types)}")
    for word in value:
        if word not in types:
            near = did_you_mean(str(word), types)
            known = f"; {key} has {', '.join(types)}" if key else "; --help lists what there is"
            raise ConfigError(f"{prefix}{word}: there is no such option{near}{known}")
    for f in dataclasses.fields(kind):
        if value.get(f.name, f.default) == MISSING:
            raise ConfigError(
                f"{prefix}{f.name} has no value, and nothing can be assumed for it: give {prefix}{f.name}=…"
            )
    return kind(**{word: bind(types[word], item, prefix + word) for word, item in value.items()})


def as_yaml(value: Any) -> str:
    """A value as YAML writes it."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(as_yaml, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def as_number(value: Any) -> Any:
    """`value`, with numbers in place of text that is one, in a list too."""
    if isinstance(value, list):
        return [as_number(item) for item in value]
    for kind in (int, float) if isinstance(value, str) else ():
        try:
            return kind(value)
        except ValueError:
            pass
    return value


def remedy_for_text(value: Any) -> str:
    """What to add to a message about text in place of a number or of a list, if it is the text of one."""
    if not isinstance(value, str) or (isinstance(as_number(value), str) and not value.startswith("[")):
        return ""
    return ", and this is text: write it without quotes; the environment's is '${oc.decode:${oc.env:NAME}}', quoted so"


def take_options(words: list[str], is_ours: Callable[[str], bool]) -> tuple[list[str], dict[str, str]]:
    """Split words into those that are left, and the values of those of the form `key=value` whose key is ours.

    Raises:
        ConfigError: a key of ours is given twice.
    """
    rest: list[str] = []
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not is_ours(key):
            rest.append(word)
        elif key in values:
            raise ConfigError(f"{word}: {key}={values[key]} is given already; give it once")
        else:
            values[key] = value
    return rest, values
