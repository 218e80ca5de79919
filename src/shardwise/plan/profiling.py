"""Decides which steps are profiled and what helps to find a mistake, and refuses what cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.config.profiling import DebugConfig, ProfileConfig
from shardwise.config.schema import RunConfig, Stage
from shardwise.errors import ConfigError, count
from shardwise.plan.capabilities import STRATEGIES, WAITS
from shardwise.plan.topology import Topology


@dataclass(frozen=True)
class Profiling:
    """Which steps are profiled, on which ranks, and with what."""

    start: int | None = None  # the first step; None: none is
    steps: int = 1
    ranks: tuple[int, ...] | None = (0,)  # None: all
    stacks: bool = False
    memory: bool = False
    tool: Literal["torch", "nsys", "ncu"] = "torch"

    def has(self, rank: int) -> bool:
        """Whether `rank` is profiled."""
        return self.ranks is None or rank in self.ranks


@dataclass(frozen=True)
class Debugging:
    """What helps to find a mistake. `launch_blocking` and NCCL's level are in `Plan.environment`."""

    sync: Literal["off", "warn", "error"] = "off"
    anomaly: bool = False
    nccl: bool = False  # whether NCCL writes a file for each rank


def make_profiling(
    config: RunConfig, launcher: str, topology: Topology, accelerator: str, max_steps: int | None
) -> Profiling:
    """Check `config.profile`, alone and beside the rest of the run.

    Raises:
        ConfigError
    """
    profile = config.profile
    if config.profiler.value == "pytorch" and config.stage is Stage.fit and max_steps is not None and max_steps < 5:
        raise ConfigError(
            f"profiler=pytorch max_steps={max_steps}: it leaves two steps out and records three; give profile.start=1 "
            f"in place of profiler=pytorch, or max_steps=5"
        )
    if profile.start is None:
        usual = ProfileConfig()
        if given := [f"profile.{word}" for word, value in vars(profile).items() if value != getattr(usual, word)]:
            raise ConfigError(
                f"{' '.join(given)}: profile.start=null profiles no step; give profile.start=N, or leave this out too"
            )
        return Profiling()
    for word, value in (("start", profile.start), ("steps", profile.steps)):
        if value < 1:
            raise ConfigError(f"profile.{word}={value}: must be at least 1")
    if config.stage is not Stage.fit:
        raise ConfigError(f"profile.start={profile.start}: stage={config.stage.value} makes no steps; leave it out")
    last = profile.start + profile.steps - 1
    if max_steps is not None and last > max_steps:
        raise ConfigError(
            f"profile.start={profile.start} profile.steps={profile.steps} ends with step {last}, and the run with step "
            f"{max_steps}: use profile.start={max(1, max_steps - profile.steps + 1)}, or a longer run"
        )
    if config.profiler.value == "pytorch":
        raise ConfigError(
            f"profile.start={profile.start} profiler=pytorch: torch profiles one window at a time; leave profiler= out"
        )
    if profile.memory and accelerator != "cuda":
        raise ConfigError(
            f"profile.memory=true needs a GPU that is CUDA, whose allocator keeps the history; leave it out on "
            f"{accelerator}"
        )
    _check_tool(profile, launcher, topology, accelerator)
    return Profiling(
        start=profile.start,
        steps=profile.steps,
        ranks=_ranks(profile.ranks, topology.world_size),
        stacks=profile.stacks,
        memory=profile.memory,
        tool=profile.tool.value,
    )


def _ranks(ranks: list[int] | str, world_size: int) -> tuple[int, ...] | None:
    if ranks == "all":
        return None
    wrong = isinstance(ranks, str) or not ranks or len(set(ranks)) < len(ranks)
    if wrong or not all(0 <= int(rank) < world_size for rank in ranks):
        text = ranks if isinstance(ranks, str) else f"[{','.join(map(str, ranks))}]"
        raise ConfigError(
            f"profile.ranks={text}: must be all, or a list such as [0] of ranks from 0 to {world_size - 1}, each once"
        )
    return tuple(sorted(map(int, ranks)))


def _check_tool(profile: ProfileConfig, launcher: str, topology: Topology, accelerator: str) -> None:
    tool = profile.tool.value
    if tool == "torch":
        return
    if accelerator != "cuda":
        raise ConfigError(f"profile.tool={tool} sees what NVIDIA's GPUs do; use profile.tool=torch on {accelerator}")
    for word in ("stacks", "memory"):
        if getattr(profile, word):
            raise ConfigError(f"profile.tool={tool} profile.{word}=true: only profile.tool=torch has it; leave one out")
    if launcher == "torchrun" or (launcher == "slurm" and tool == "ncu"):
        way = "python train.py devices=N, shardwise submit" if tool == "nsys" else "python train.py devices=1"
        raise ConfigError(
            f"profile.tool={tool} goes before each rank's command, and {launcher} has started the ranks already: use "
            f"{way}, or profile.tool=torch"
        )
    if tool == "ncu" and topology.world_size > 1:
        raise ConfigError(
            f"profile.tool=ncu runs each kernel several times, and those of NCCL would wait for each other for ever: "
            f"use strategy=ddp devices=1 in place of {count(topology.world_size, 'rank')}, or profile.tool=nsys"
        )


def make_debugging(config: RunConfig, accelerator: str) -> Debugging:
    """Check `config.debug`, alone and beside the rest of the run.

    Raises:
        ConfigError: an option that only CUDA has, on the CPU; or debug.sync=error where each step waits on purpose.
    """
    debug = config.debug
    if accelerator != "cuda":
        why = {"sync": "tells of waiting for the device", "launch_blocking": "launches kernels", "nccl": "uses NCCL"}
        for word, does in why.items():
            value = getattr(debug, word)
            if value is True or getattr(value, "value", "off") != "off":
                text = "true" if value is True else value.value
                raise ConfigError(f"debug.{word}={text} needs CUDA: nothing on {accelerator} {does}; leave it out")
    strategy = config.strategy.name
    reasons = {"precision=fp16": config.precision.loss_scaling and WAITS,
               f"strategy={strategy}": STRATEGIES[strategy].sync_errors}  # fmt: skip
    for word, reason in reasons.items():
        if debug.sync.value == "error" and reason:
            raise ConfigError(f"debug.sync=error {word}: {reason}")
    return Debugging(sync=debug.sync.value, anomaly=debug.anomaly, nccl=debug.nccl.value != "off")


def debug_environment(debug: DebugConfig) -> dict[str, str]:
    """What CUDA and NCCL read from the environment."""
    words = {"CUDA_LAUNCH_BLOCKING": "1"} if debug.launch_blocking else {}
    return words | ({"NCCL_DEBUG": debug.nccl.value.upper()} if debug.nccl.value != "off" else {})
