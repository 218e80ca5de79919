"""What a benchmark records of where it ran."""

from __future__ import annotations

import argparse
import re
from typing import Any

from shardwise.run_dir.environment import describe_environment


def measured_on(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The environment, without the machine's name, and the device's name as it stands in a file's. Of the command
    line: `accelerator`, and `commit` where the code was copied without its history."""
    environment = describe_environment()
    del environment["hostname"]
    environment["commit"] = arguments.commit or environment["commit"]
    gpu = environment["gpus"][0] if arguments.accelerator == "cuda" else "cpu"
    return environment, re.sub(r"[^a-z0-9]+", "-", gpu.lower())
