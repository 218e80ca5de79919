"""The Plan: a run's config with every decision made, and what follows from it. Frozen; all tools and ranks read it.

No value is "auto", or a None that means "guess". There is one exception: whether GPUs can share memory, the set-up has
to try (`symmetric_memory` and `overlaps_peers`). This file imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from shardwise.config.groups import STRATEGY_CONFIGS, CompileConfig, GuardConfig, StrategyConfig
from shardwise.config.schema import RunConfig, bind
from shardwise.errors import count
from shardwise.plan.capabilities import STRATEGIES, Capabilities
from shardwise.plan.topology import Topology

FINDER_STEPS = 100  # the steps of find_learning_rate=true

RESUME_ALLOW = ("data", "global_batch_size", "optimizer", "seed", "tokenizer")

Launcher = Literal["local", "torchrun", "slurm"]


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
class Compile(CompileConfig):
    overlaps_peers: bool | None = False  # products beside what a tensor axis exchanges; None: the set-up tries


@dataclass(frozen=True)
class Guard(GuardConfig):
    pass_over: tuple[int, ...] = ()  # the training clock at each window whose gradients are thrown away


@dataclass(frozen=True)
class Choice:
    """One of several ways to compute the same numbers."""

    name: str
    reason: str  # why `auto` chose it; empty: the user named it


_BEFORE = "the run began before there was a choice"


@dataclass(frozen=True, kw_only=True)
class Plan(RunConfig):
    """A RunConfig whose options are resolved, and what they lead to.

    `resume` and `init_from` are absolute paths, `freeze` names parts, `num_workers` of `data` is a number, and so on.
    """

    compile: Compile = Compile()
    guard: Guard = Guard()
    run_id: str
    run_dir: str
    may_fall_back: bool  # to an older checkpoint, if `resume` is damaged
    launcher: Launcher
    topology: Topology
    peak_tflops: float | None  # the dense peak of one GPU; None: not known, or a CPU
    accumulate_grad_batches: int  # micro-batches of one rank in one step
    environment: dict[str, str]  # set in every rank, unless the user has set it
    chosen_loss: Choice = Choice("full", _BEFORE)
    chosen_attention: Choice = Choice("sdpa", _BEFORE)
    link_gb_per_second: float | None = None  # from one GPU, in one direction, over the slowest link; None: not known

    @property
    def capabilities(self) -> Capabilities:
        return STRATEGIES[self.strategy.name]

    @property
    def zero_stage(self) -> int:
        """The stage 1 to 3 under DeepSpeed, else 0. It is for `strategies/`; others ask for what can be done."""
        return len(self.capabilities.shards) if self.capabilities.owns_step else 0

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
        raw = _in_words_of_today(json.loads(text))
        kind = STRATEGY_CONFIGS.get(raw["strategy"]["name"], StrategyConfig)
        strategy = bind(kind, _known(kind, raw["strategy"]))
        plan: Plan = bind(Plan, _known(Plan, raw) | {"strategy": dataclasses.asdict(strategy)})
        return dataclasses.replace(plan, strategy=strategy)


def _known(kind: Any, raw: dict[str, Any]) -> dict[str, Any]:
    """What a class has of `raw`: versions before and after this one have other options."""
    types = get_type_hints(kind)
    found = {key: value for key, value in raw.items() if key in types}
    for key, value in found.items():
        of = next((k for k in (types[key], *get_args(types[key])) if dataclasses.is_dataclass(k)), None)
        if of is not None and isinstance(value, dict):
            found[key] = _known(of, value)
    return found


def _in_words_of_today(raw: dict[str, Any]) -> dict[str, Any]:
    """What an earlier version has written into a plan.json, as this one would."""
    for key in ("compile", "activation_checkpointing"):
        if isinstance(raw[key], str):
            raw[key] = {"name": raw[key]}
    raw.setdefault("gc_every_n_steps", None)
    if "benchmark" in raw:
        raw["cudnn_benchmark"] = raw.pop("benchmark")
    if "detect_anomaly" in raw:
        raw["debug"] = {"anomaly": raw.pop("detect_anomaly")}
    for key in ("loss", "attention"):
        if isinstance(choice := raw.get(key), dict):
            raw |= {f"chosen_{key}": choice, key: "auto" if choice["reason"] else choice["name"]}
    sizes = {f"{axis}_parallel_size": raw["topology"].get(axis, 1) for axis in ("tensor", "context", "pipeline")}
    raw["strategy"] = sizes | raw["strategy"]
    if raw.get("profile", {}).get("ranks", "all") is None:
        raw["profile"]["ranks"] = "all"
    if isinstance(nccl := raw.get("debug", {}).get("nccl"), bool):
        raw["debug"]["nccl"] = "warn" if nccl else "off"
    return raw


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
