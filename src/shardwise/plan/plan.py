"""The Plan: every decision about a run, frozen.

No value is "auto", or a None that means "guess". There is one exception: whether GPUs can share memory, the set-up has
to try (`symmetric_memory` and `overlaps_peers`). All tools read the same Plan; this file imports no torch."""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.errors import count
from shardwise.plan.measuring import Measuring
from shardwise.plan.profiling import Debugging, Profiling
from shardwise.plan.strategy import Strategy as Strategy
from shardwise.plan.topology import Topology

FINDER_STEPS = 100  # the steps of find_learning_rate=true

RESUME_ALLOW = ("data", "global_batch_size", "optimizer", "seed", "tokenizer")

Launcher = Literal["local", "torchrun", "slurm"]
StageName = Literal["fit", "validate", "test", "predict"]
CompileName = Literal["none", "layer", "model"]
CompileModeName = Literal["default", "max-autotune"]
ActivationCheckpointingName = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Host:
    """The machine and the launcher, as the process finds them before it reads a config."""

    cuda_devices: int  # the number that this process sees
    launcher: Launcher = "local"
    nodes: int | None = None  # the number that the launcher gives, if any
    devices: int | None = None  # the number of processes on each node that the launcher gives, if any
    run_id: str | None = None  # from Slurm or torchrun, or made by the parent
    run_id_is_new: bool = False  # whether the next start of the same command has another
    is_terminal: bool = False
    gpu: str | None = None  # the name of the visible GPUs; None: there are none, or it is not known
    gpu_capability: tuple[int, int] | None = None  # compute capability; None: there are no GPUs, or it is not known
    cpus: int = 1  # the number that this process may use
    rocm: bool = False  # the CUDA devices are AMD's
    cpus_per_rank: int | None = None  # the number that Slurm gives each rank; None: the ranks of a node share `cpus`


@dataclass(frozen=True)
class Float8:
    """Which linear layers multiply in fp8, and how."""

    recipe: Literal["tensorwise", "rowwise"]  # one scale for a matrix, or one for each row
    keep_in_bf16: tuple[str, ...]  # patterns of the names of layers
    min_features: int  # a layer with fewer inputs or outputs stays in bf16
    emulate: bool  # products in fp32 of what fp8 can hold


@dataclass(frozen=True)
class Precision:
    name: str
    parameter_dtype: str
    compute_dtype: str
    reduce_dtype: str
    loss_scaling: bool
    tf32: bool
    fp8: Float8 | None = None  # None: no layer multiplies in fp8

    @property
    def is_low(self) -> bool:
        """Whether layers compute in 16 bits."""
        return self.compute_dtype in ("bfloat16", "float16")

    @property
    def is_mixed(self) -> bool:
        """Whether layers compute on copies of the parameters in another dtype."""
        return self.compute_dtype != self.parameter_dtype


@dataclass(frozen=True)
class Compile:
    name: CompileName = "none"
    memory_budget: float | None = None  # the share of activations that the compiler keeps; None: as many as it likes
    recompute_elementwise: bool = False  # norms, too; in the backward pass
    mode: CompileModeName = "default"
    cudagraphs: bool = False
    overlaps_peers: bool | None = False  # products beside what a tensor axis exchanges; None: the set-up tries


@dataclass(frozen=True)
class ActivationCheckpointing:
    name: ActivationCheckpointingName = "none"
    every_n_layers: int = 1  # of so many units one is checkpointed
    save: tuple[str, ...] = ()  # the operations whose results selective keeps


@dataclass(frozen=True)
class Checkpointing:
    save_every_n_steps: int | None
    keep_last: int
    monitor: str | None
    mode: str
    save_at_end: bool
    keep_every_n_steps: int | None  # these of the saved ones are kept for good; None: none is
    asynchronous: bool
    when_busy: Literal["wait", "skip"]
    max_failures: int
    save_every_n_epochs: int | None = None

    @property
    def saves(self) -> bool:
        return self.save_at_end or self.save_every_n_steps is not None or self.save_every_n_epochs is not None


@dataclass(frozen=True)
class Guarding:
    on_nonfinite: Literal["stop", "skip"]
    on_spike: Literal["ignore", "warn", "skip", "rollback"]
    max_in_a_row: int
    spike_z: float
    pass_over: tuple[int, ...] = ()  # the training clock at each window whose gradients are thrown away


@dataclass(frozen=True)
class Choice:
    """One of several ways to compute the same numbers."""

    name: str
    reason: str  # why `auto` chose it; empty: the user named it


@dataclass(frozen=True)
class Logging:
    name: Literal["csv", "wandb", "tensorboard"]
    project: str
    entity: str | None
    mode: str
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    run_id: str
    run_dir: str
    stage: StageName
    resume: str | None  # the path of a checkpoint; None: the run starts anew
    init_from: str | None  # safetensors to start from; None: the seed makes the weights
    may_fall_back: bool  # to an older checkpoint, if this one is damaged
    resume_allow: tuple[str, ...]
    seed: int
    launcher: Launcher
    accelerator: Literal["cpu", "cuda"]  # cuda also on AMD's GPUs
    topology: Topology
    peak_tflops: float | None  # the dense peak of one GPU; None: not known, or a CPU
    strategy: Strategy
    precision: Precision
    micro_batch_size: int  # samples of one data-parallel rank in one forward
    accumulate_grad_batches: int  # micro-batches of one rank in one step
    global_batch_size: int  # samples of all ranks in one step
    max_steps: int | None  # None: max_epochs decides
    max_epochs: int | None  # None: max_steps decides
    gradient_clip_val: float | None  # the largest 2-norm over all ranks; None: no clipping
    log_every_n_steps: int
    validate_every_n_steps: int | None  # None: at the ends of epochs
    max_validation_batches: int | None  # the most batches of all ranks together; None: all; 0: no validation
    checkpoint: Checkpointing
    guard: Guarding
    logger: Logging
    progress_bar: bool
    optimizer: dict[str, Any] | None
    optimizer_override: bool
    deterministic: bool  # whether runs on the same hardware give the same bits
    compile: Compile
    activation_checkpointing: ActivationCheckpointing
    ema_decay: float | None  # the decay of the average of the weights; None: no average
    max_restarts: int  # how often the local launcher restarts a run that crashed or hung
    memory_history: bool  # whether to record allocations, for when memory runs out
    schedule: dict[str, Any] | None
    units: tuple[str, ...] | None  # classes of layers; None: they are found
    environment: dict[str, str]  # set in every rank, unless the user has set it
    module: dict[str, Any]
    data: dict[str, Any] | None  # None: the module's own loaders
    callbacks: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # the user's, in order
    trust: bool = False  # whether to read pickles in a checkpoint, which may run any code
    loggers: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # the user's trackers
    max_train_batches: int | None = None  # micro-batches of one rank in an epoch; None: all
    quick_check: bool = False
    whole_weights_in: tuple[str, ...] | None = None  # hooks; None: those of a run, an epoch, a validation, a checkpoint
    profiler: Literal["none", "simple", "advanced", "pytorch"] = "none"
    find_learning_rate: bool = False
    gradient_clip_algorithm: Literal["norm", "value"] = "norm"
    min_steps: int | None = None  # an early stop waits for this step
    min_epochs: int | None = None
    cudnn_benchmark: bool = False
    loss: Choice = Choice("full", "the run began before there was a choice")
    attention: Choice = Choice("sdpa", "the run began before there was a choice")
    profile: Profiling = dataclasses.field(default_factory=Profiling)
    debug: Debugging = dataclasses.field(default_factory=Debugging)
    metrics: Measuring = dataclasses.field(default_factory=Measuring)
    gc_every_n_steps: int | None = None  # None: Python's garbage is collected when Python likes
    freeze: tuple[str, ...] = ()  # parts of the module that are not trained, by name
    freeze_epochs: int | None = None  # they are trained after so many epochs; None: never
    validate_every_n_epochs: int | None = None  # None: at the end of every epoch, or by steps
    link_gb_per_second: float | None = None  # from one GPU, in one direction, over the slowest link; None: not known

    def logs(self, step: int) -> bool:
        """Whether the numbers of `step` are logged."""
        return step % self.log_every_n_steps == 0 or step in (1, self.max_steps)

    @property
    def goes_on_by(self) -> str:
        """The words that go on with this run. Its name may have been made up."""
        folder = Path(self.run_dir).parent
        where = "" if folder == Path.cwd() / "runs" else f"runs_dir={shlex.quote(str(folder))} "
        return f"{where}name={self.run_id} resume=auto"

    def going_on_from(
        self, resume: str | None, *, may_fall_back: bool | None = None, pass_over: int | None = None
    ) -> Plan:
        """The Plan of the same run from another checkpoint. Nothing else of a Plan changes after it is made.

        `pass_over`: the training clock at another window whose gradients are thrown away.
        """
        fall_back = self.may_fall_back if may_fall_back is None else may_fall_back
        guard = self.guard
        if pass_over is not None:
            guard = dataclasses.replace(guard, pass_over=(*guard.pass_over, pass_over))
        return dataclasses.replace(self, resume=resume, may_fall_back=fall_back, guard=guard)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> Plan:
        raw = json.loads(text)
        for key, kind in (("topology", Topology), ("strategy", Strategy), ("precision", Precision),
                          ("checkpoint", Checkpointing), ("guard", Guarding), ("logger", Logging)):  # fmt: skip
            raw[key] = kind(**raw[key])
        if (fp8 := raw["precision"].fp8) is not None:
            fp8 = Float8(**fp8 | {"keep_in_bf16": tuple(fp8["keep_in_bf16"])})
            raw["precision"] = dataclasses.replace(raw["precision"], fp8=fp8)
        raw |= {key: Choice(**raw[key]) for key in ("loss", "attention") if key in raw}  # an earlier plan.json has none
        _read_earlier_words(raw)
        if "profile" in raw:  # an earlier plan.json has neither
            ranks = raw["profile"]["ranks"]
            raw["profile"] = Profiling(**raw["profile"] | {"ranks": None if ranks is None else tuple(ranks)})
            raw["debug"] = Debugging(**raw["debug"])
        raw["compile"] = Compile(**raw["compile"])
        saved = raw["activation_checkpointing"]
        raw["activation_checkpointing"] = ActivationCheckpointing(**saved | {"save": tuple(saved.get("save", ()))})
        raw["logger"] = dataclasses.replace(raw["logger"], tags=tuple(raw["logger"].tags))
        raw["metrics"] = Measuring(**raw.get("metrics", {}))
        raw["guard"] = dataclasses.replace(raw["guard"], pass_over=tuple(raw["guard"].pass_over))
        raw["resume_allow"] = tuple(raw["resume_allow"])
        raw["freeze"] = tuple(raw.get("freeze", ()))
        raw["units"] = None if raw["units"] is None else tuple(raw["units"])
        whole = raw.get("whole_weights_in")
        raw["whole_weights_in"] = None if whole is None else tuple(whole)
        return Plan(**raw)


def _read_earlier_words(raw: dict[str, Any]) -> None:
    """Replace what an earlier version has written into a plan.json by what it means now, in place."""
    for key in ("compile", "activation_checkpointing"):
        if isinstance(raw[key], str):
            raw[key] = {"name": raw[key]}
    if "benchmark" in raw:
        raw["cudnn_benchmark"] = raw.pop("benchmark")
    if "detect_anomaly" in raw:
        raw["debug"] = Debugging(anomaly=raw.pop("detect_anomaly"))


def headline(plan: Plan) -> str:
    """Two lines for the user about the run that begins."""
    topology = plan.topology
    mesh = " × ".join(f"{axis} {size}" for axis, size in topology.mesh.items() if size > 1) or "one rank"
    length = count(plan.max_steps, "step") if plan.max_steps else count(plan.max_epochs or 0, "epoch")
    if plan.stage == "fit":
        batches = (
            f"{length}, global batch {plan.global_batch_size} = {count(plan.micro_batch_size, 'sample')} × "
            f"{count(topology.data_parallel_size, 'rank')} × {count(plan.accumulate_grad_batches, 'micro-batch')}"
        )
    else:
        limit = plan.max_validation_batches if plan.stage == "validate" else None
        batches = "every sample once" if limit is None else f"at most {count(limit, 'batch')} of each validation set"
    resumed = f", from {Path(begin).name}" if (begin := plan.resume or plan.init_from) else ""
    return (
        f"run {plan.run_id}: {plan.stage} with {plan.strategy.name}, {plan.precision.name}, on "
        f"{count(topology.world_size, f'{plan.accelerator} rank')} ({mesh}){resumed}\n"
        f"{batches}{'' if plan.quick_check else f'; in {plan.run_dir}'}"
    )
