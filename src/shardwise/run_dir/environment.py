"""Describes what a run runs on: versions, commit, machine. It is recorded beside the run's config."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

from shardwise.plan.choices import installed

_PACKAGES = (
    "torch", "lightning", "torchmetrics", "hydra-core", "omegaconf", "numpy", "wandb", "triton", "flash-attn-4",
    "quack-kernels", "torchao", "deepspeed",
)  # fmt: skip


def describe_environment() -> dict[str, Any]:
    """Versions, commit and device names; None where something is absent. No secrets, no environment variables."""
    from shardwise import accelerator

    versions = accelerator.versions()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": platform.node(),
        "packages": {name: installed(name) for name in _PACKAGES},
        "cuda": versions["cuda"],
        "hip": versions["hip"],
        "nccl": versions["nccl"],
        "gpus": accelerator.device_names(),
        **describe_commit(),
    }


def describe_commit() -> dict[str, Any]:
    """The commit of the code that runs, and whether files differ from it."""
    commit = git("rev-parse", "HEAD")
    return {"commit": commit, "uncommitted_changes": bool(git("status", "--porcelain")) if commit else None}


def git(*arguments: str, folder: Path = Path(__file__).parent) -> str | None:
    """What git answers in `folder`; None: it fails, is not installed, or the folder is of no repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
