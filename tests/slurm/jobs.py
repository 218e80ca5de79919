"""Jobs as a user submits them: sbatch and the templates, on the testbed."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness.commands import environment
from tests.harness.patience import run_patiently, wait_until

ROOT = Path(__file__).resolve().parents[2]
GENERIC = ROOT / "slurm" / "generic.sbatch"
PATIENCE = 120.0  # seconds on an idle machine: see tests/harness/patience.py


def call(*words: Any, check: bool = True, cwd: Path | None = None, **more: str) -> str:
    command = [str(word) for word in words]
    done = run_patiently(command, PATIENCE, cwd=cwd, env=clean(**more), stdin=subprocess.DEVNULL)
    assert done.returncode == 0 or not check, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


def clean(**more: str) -> dict[str, str]:
    """This process's environment without what another job or test has left in it."""
    kept = {key: value for key, value in environment().items() if not key.startswith(("SLURM_", "SBATCH_"))}
    return {**kept, "SHARDWISE_HOME": str(ROOT), "SLURM_CONF": os.environ["SLURM_CONF"], **more}


class Submitted:
    """A job, from sbatch to its end, over requeues."""

    def __init__(self, home: Path, options: list[str], *overrides: str, template: Path = GENERIC, **more: str) -> None:
        self.home = home
        self.id = call("sbatch", "--parsable", *options, template, *overrides, cwd=home, **more)
        self.log = home / f"slurm-{self.id}.log"

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def state(self) -> str:
        """As scontrol knows it, for five minutes after the job's end too."""
        found = re.search(r"JobState=(\w+)", call("scontrol", "show", "job", self.id, check=False))
        return found[1] if found else "GONE"

    def starts(self) -> int:
        return self.text().count("shardwise: start ")

    def step(self) -> int:
        """The last that this start has told of."""
        found = re.findall(r"^step (\d+)/", self.text().rpartition("shardwise: start ")[2], re.MULTILINE)
        return int(found[-1]) if found else 0

    def wait(self, until: Callable[[], Any], what: str) -> None:
        wait_until(until, what, PATIENCE, lambda: f"the job is {self.state()}\n{self.text()[-4000:]}")

    def wait_for_end(self) -> str:
        """How Slurm says that it ended."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait(lambda: self.state() in over, "the job's end")
        return self.state()

    def ranks(self) -> dict[int, int]:
        """Rank → process id of the running step's tasks; the emulated nodes are this machine."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
                is_task = Path(f"/proc/{parent}/comm").read_text().strip() == "slurmstepd"
            except OSError:
                continue
            if is_task and f"SLURM_JOB_ID={self.id}" in words and any(w.startswith("SLURM_STEP_ID=") for w in words):
                found |= {int(w.partition("=")[2]): int(folder.name) for w in words if w.startswith("SLURM_PROCID=")}
        return found
