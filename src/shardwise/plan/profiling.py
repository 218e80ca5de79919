"""Decides which steps are profiled and what helps to find a mistake, and refuses what cannot be."""

from __future__ import annotations

from shardwise.config.groups import DebugConfig, ProfileConfig
from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError, count
from shardwise.plan.capabilities import STRATEGIES, WAITS
from shardwise.plan.topology import Topology


def check_profiling(
    config: RunConfig, launcher: str, topology: Topology, accelerator: str, max_steps: int | None
) -> None:
    """Check `config.profile`, alone and beside the rest of the run.

    Raises:
        ConfigError
    """
    profile = config.profile
    if config.profiler == "pytorch" and config.stage == "fit" and max_steps is not None and max_steps < 5:
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
        return
    if config.stage != "fit":
        raise ConfigError(f"profile.start={profile.start}: stage={config.stage} makes no steps; leave it out")
    last = profile.start + profile.steps - 1
    if max_steps is not None and last > max_steps:
        raise ConfigError(
            f"profile.start={profile.start} profile.steps={profile.steps} ends with step {last}, and the run with step "
            f"{max_steps}: use profile.start={max(1, max_steps - profile.steps + 1)}, or a longer run"
        )
    if config.profiler == "pytorch":
        raise ConfigError(
            f"profile.start={profile.start} profiler=pytorch: torch profiles one window at a time; leave profiler= out"
        )
    if profile.memory and accelerator != "cuda":
        raise ConfigError(
            f"profile.memory=true needs a GPU that is CUDA, whose allocator keeps the history; leave it out on "
            f"{accelerator}"
        )
    _check_tool(profile, launcher, topology, accelerator)
    _check_ranks(profile.ranks, topology.world_size)


def _check_ranks(ranks: tuple[int, ...] | str, world_size: int) -> None:
    if ranks == "all":
        return
    wrong = isinstance(ranks, str) or not ranks or len(set(ranks)) < len(ranks)
    if wrong or not all(0 <= int(rank) < world_size for rank in ranks):
        text = ranks if isinstance(ranks, str) else f"[{','.join(map(str, ranks))}]"
        raise ConfigError(
            f"profile.ranks={text}: must be all, or a list such as [0] of ranks from 0 to {world_size - 1}, each once"
        )


def _check_tool(profile: ProfileConfig, launcher: str, topology: Topology, accelerator: str) -> None:
    tool = profile.tool
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


def check_debugging(config: RunConfig, accelerator: str) -> None:
    """Check `config.debug`, alone and beside the rest of the run.

    Raises:
        ConfigError: an option that only CUDA has, on the CPU; or debug.sync=error where each step waits on purpose.
    """
    debug = config.debug
    if accelerator != "cuda":
        why = {"sync": "tells of waiting for the device", "launch_blocking": "launches kernels", "nccl": "uses NCCL"}
        for word, does in why.items():
            value = getattr(debug, word)
            if value not in (False, "off"):
                text = "true" if value is True else value
                raise ConfigError(f"debug.{word}={text} needs CUDA: nothing on {accelerator} {does}; leave it out")
    strategy = config.strategy.name
    reasons = {"precision=fp16": config.precision.loss_scaling and WAITS,
               f"strategy={strategy}": STRATEGIES[strategy].sync_errors}  # fmt: skip
    for word, reason in reasons.items():
        if debug.sync == "error" and reason:
            raise ConfigError(f"debug.sync=error {word}: {reason}")


def debug_environment(debug: DebugConfig) -> dict[str, str]:
    """What CUDA and NCCL read from the environment."""
    words = {"CUDA_LAUNCH_BLOCKING": "1"} if debug.launch_blocking else {}
    return words | ({"NCCL_DEBUG": debug.nccl.upper()} if debug.nccl != "off" else {})
