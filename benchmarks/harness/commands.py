"""Commands as a user would start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import ROOT


def environment_of_commands() -> dict[str, str]:
    earlier = os.environ.get("PYTHONPATH", "")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), earlier])}


def train(words: list[str], log: Path, timeout_seconds: float) -> int:
    """`python train.py` with these words. What it prints goes into a file. The exit code; 124: it took too long."""
    with log.open("w") as file:
        try:
            return subprocess.run(
                [sys.executable, str(ROOT / "train.py"), *words], cwd=ROOT, env=environment_of_commands(), check=False,
                timeout=timeout_seconds, stdout=file, stderr=file,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return 124
