"""The options of a profile, and those that find a mistake: `profile.…` and `debug.…`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shardwise.config.groups import option


class ProfileTool(Enum):
    torch = "torch"
    nsys = "nsys"
    ncu = "ncu"


class DebugSync(Enum):
    off = "off"
    warn = "warn"
    error = "error"


class DebugNccl(Enum):
    off = "off"
    version = "version"
    warn = "warn"
    info = "info"
    trace = "trace"


@dataclass
class ProfileConfig:
    """Which steps of a run are profiled, on which ranks, and with what."""

    start: int | None = option(
        None, "the first step that is profiled; the run's losses and weights stay the same to the bit"
    )
    steps: int = option(1, "how many steps are profiled; one is usually enough")
    ranks: list[int] | str = option([0], "the ranks that are profiled, or all", form="[0]|all")
    stacks: bool = option(
        False, "names the line of Python behind each operation; the profiled steps become much slower"
    )
    memory: bool = option(False, "on CUDA: what holds memory over these steps, by category, with the largest blocks")
    tool: ProfileTool = option(
        ProfileTool.torch,
        "torch writes a trace and reads it; nsys and ncu put NVIDIA's profilers before it, ncu on one GPU alone",
    )


@dataclass
class DebugConfig:
    """Options that find a mistake. Each makes a run slower."""

    sync: DebugSync = option(
        DebugSync.off, "on CUDA: warn of each operation that lets the host wait for the GPU in a step, or stop at it; "
        "costs little"
    )  # fmt: skip
    anomaly: bool = option(
        False, "which forward operation gave a gradient that is not finite; a step takes about twice as long, or longer"
    )
    launch_blocking: bool = option(
        False, "on CUDA: the host waits for every kernel, so that an error names its own line; several times slower"
    )
    nccl: DebugNccl = option(
        DebugNccl.off, "what NCCL says, in a file for each rank in the run's logs/; info costs little after the start, "
        "trace a lot"
    )  # fmt: skip
