"""RunConfig + Host → Plan: every rule that spans fields, and every number that follows from others.

A Plan is resolved and frozen: no "auto", no None that means "guess". The launcher, the Trainer and every tool read
the same one, so that they cannot disagree. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.errors import count
from shardwise.plan.topology import Topology

FINDER_STEPS = 100  # of find_learning_rate=true

RESUME_ALLOW = ("data", "global_batch_size", "optimizer", "seed")

Launcher = Literal["local", "torchrun", "slurm"]
StageName = Literal["fit", "validate", "test", "predict"]
CompileName = Literal["none", "layer", "model"]
ActivationCheckpointingName = Literal["none", "full"]


@dataclass(frozen=True)
class Host:
    """What the process found around itself, before any config is read."""

    cuda_devices: int  # visible to this process
    launcher: Launcher = "local"
    nodes: int | None = None  # told by the launcher; None: nobody said
    devices: int | None = None  # processes a node, told by the launcher
    run_id: str | None = None  # from Slurm or torchrun, or made by the parent
    is_terminal: bool = False
    gpu: str | None = None  # the visible GPUs' name; None: there is none, or it is not known


@dataclass(frozen=True)
class Strategy:
    name: Literal["ddp", "fsdp", "fsdp_hybrid", "zero1", "zero2", "zero3"]
    timeout_minutes: float
    find_unused_parameters: bool = False
    bucket_cap_mb: int = 25
    reshard_after_forward: bool = True
    defer_gradient_sync: bool = False
    offload_optimizer: bool = False
    offload_parameters: bool = False

    @property
    def zero_stage(self) -> int:
        """1 to 3 under DeepSpeed, else 0."""
        return int(self.name[-1]) if self.name.startswith("zero") else 0


@dataclass(frozen=True)
class Precision:
    name: str
    parameter_dtype: str
    compute_dtype: str
    reduce_dtype: str
    loss_scaling: bool
    tf32: bool

    @property
    def is_low(self) -> bool:
        """Layers compute in 16 bits."""
        return self.compute_dtype in ("bfloat16", "float16")

    @property
    def is_mixed(self) -> bool:
        """Layers compute on copies of the parameters in another dtype."""
        return self.compute_dtype != self.parameter_dtype


@dataclass(frozen=True)
class Checkpointing:
    save_every_n_steps: int | None
    keep_last: int
    monitor: str | None
    mode: str
    save_at_end: bool
    keep_every_n_steps: int | None  # of those that are saved; None: none is kept for good
    asynchronous: bool
    when_busy: Literal["wait", "skip"]
    max_failures: int

    @property
    def saves(self) -> bool:
        return self.save_at_end or self.save_every_n_steps is not None


@dataclass(frozen=True)
class Guarding:
    on_nonfinite: Literal["stop", "skip"]
    on_spike: Literal["ignore", "warn", "skip", "rollback"]
    max_in_a_row: int
    spike_z: float
    pass_over: tuple[int, ...] = ()  # the training clock at windows whose gradients are thrown away


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
    resume: str | None  # a checkpoint's path, or None: start from the seed
    init_from: str | None  # safetensors to start from where nothing is resumed; None: the seed's weights
    may_fall_back: bool  # from a checkpoint that turns out to be damaged, to the one before
    resume_allow: tuple[str, ...]
    seed: int
    launcher: Launcher
    accelerator: Literal["cpu", "cuda"]
    topology: Topology
    peak_tflops: float | None  # dense, of one GPU in the run's precision; None: not known, or a CPU
    strategy: Strategy
    precision: Precision
    micro_batch_size: int  # samples per data-parallel rank per forward
    accumulate_grad_batches: int  # micro-batches per rank per step
    global_batch_size: int  # samples per step over all ranks
    max_steps: int | None  # None: max_epochs decides
    max_epochs: int | None  # None: max_steps decides
    gradient_clip_val: float | None  # global 2-norm; None: the norm is logged, not bounded
    log_every_n_steps: int
    validate_every_n_steps: int | None  # None: at the end of every epoch
    max_validation_batches: int | None  # of all ranks; None: all; 0: a fit does not validate
    checkpoint: Checkpointing
    guard: Guarding
    logger: Logging
    progress_bar: bool
    optimizer: dict[str, Any] | None
    optimizer_override: bool
    deterministic: bool  # the same bits in every run on the same hardware
    compile: CompileName
    activation_checkpointing: ActivationCheckpointingName
    ema_decay: float | None  # of the averaged weights that validation and checkpoints see as well; None: no average
    max_restarts: int  # of a run that crashed or hung, by the local launcher
    memory_history: bool  # every allocation's stack is kept, for the snapshot of a rank that runs out of memory
    schedule: dict[str, Any] | None
    units: tuple[str, ...] | None  # class names; None: found
    environment: dict[str, str]  # of every rank, where the user's own does not say otherwise
    module: dict[str, Any]
    data: dict[str, Any] | None  # null: the module's own loaders
    callbacks: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # the user's own, in order
    trust: bool = False  # what a checkpoint holds as a pickle, which may run any code, is read
    loggers: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # trackers of the user's own
    max_train_batches: int | None = None  # micro-batches of one rank in an epoch: whole windows; None: all
    quick_check: bool = False
    profiler: Literal["none", "simple", "advanced", "pytorch"] = "none"
    find_learning_rate: bool = False
    gradient_clip_algorithm: Literal["norm", "value"] = "norm"
    min_steps: int | None = None  # an early stop waits for them
    min_epochs: int | None = None
    benchmark: bool = False
    detect_anomaly: bool = False

    def logs(self, step: int) -> bool:
        """Whether the step's numbers are logged."""
        return step % self.log_every_n_steps == 0 or step in (1, self.max_steps)

    def going_on_from(
        self, resume: str | None, *, may_fall_back: bool | None = None, pass_over: int | None = None
    ) -> Plan:
        """The same run, from another checkpoint. Nothing else of a Plan changes once it is made.

        `pass_over`: the training clock at one more window whose gradients are thrown away.
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
        raw["logger"] = dataclasses.replace(raw["logger"], tags=tuple(raw["logger"].tags))
        raw["guard"] = dataclasses.replace(raw["guard"], pass_over=tuple(raw["guard"].pass_over))
        raw["resume_allow"] = tuple(raw["resume_allow"])
        raw["units"] = None if raw["units"] is None else tuple(raw["units"])
        return Plan(**raw)


def headline(plan: Plan) -> str:
    """What is about to run, in two lines."""
    topology = plan.topology
    mesh = " × ".join(f"{axis} {size}" for axis, size in topology.mesh.items() if size > 1) or "one rank"
    length = count(plan.max_steps, "step") if plan.max_steps else count(plan.max_epochs or 0, "epoch")
    if plan.stage == "fit":
        batches = (
            f"{length}, global batch {plan.global_batch_size} = {count(plan.micro_batch_size, 'sample')} × "
            f"{count(topology.data_parallel_size, 'rank')} × {count(plan.accumulate_grad_batches, 'micro-batch')}"
        )
    else:
        batches = "every sample once"
    begin = plan.resume or plan.init_from
    resumed = f", from {Path(begin).name}" if begin else ""
    return (
        f"run {plan.run_id}: {plan.stage} with {plan.strategy.name}, {plan.precision.name}, on "
        f"{count(topology.world_size, f'{plan.accelerator} rank')} ({mesh}){resumed}\n"
        f"{batches}; in {plan.run_dir}"
    )
