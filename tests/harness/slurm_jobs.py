"""Jobs as a user submits them: sbatch and the templates, on the testbed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.harness.commands import environment
from tests.harness.patience import run_patiently, wait_until

ROOT = Path(__file__).resolve().parents[2]
TESTBED = ROOT / "slurm" / "testbed"
GENERIC = ROOT / "slurm" / "generic.sbatch"
WARNED = 295  # seconds before a job's time is over
PATIENCE = 120.0  # seconds on an idle machine: see tests/harness/patience.py


@contextmanager
def testbed() -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands work. The testbed is left as it was found: up or down."""
    was_up = subprocess.run(["pgrep", "-f", "slurmctld.*shardwise-testbed"], capture_output=True, check=False)
    subprocess.run([TESTBED / "up"], check=True, timeout=300)
    said = subprocess.run(
        ["bash", "-c", ". /var/lib/shardwise-testbed/env && env -0"], capture_output=True, text=True, check=True
    )
    yield dict(word.split("=", 1) for word in said.stdout.split("\0") if word.startswith(("SLURM_CONF=", "PATH=")))
    if was_up.returncode:
        subprocess.run([TESTBED / "down"], check=True, timeout=120)


def words(steps: int, save_every: int = 10) -> list[str]:
    """Of the run that tests/harness/chaos.py interrupts."""
    return [
        "recipe=custom", "module._target_=subject.Subject", "data._target_=subject.Data",
        "+data.batch_size=${micro_batch_size}", "micro_batch_size=2", "global_batch_size=8", f"max_steps={steps}",
        "validate_every_n_steps=20", f"checkpoint.save_every_n_steps={save_every}", "log_every_n_steps=1",
        "accelerator=cpu", "runs_dir=runs",
    ]  # fmt: skip


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


# What Slurm, and what happens on a node, does to a job that runs on two nodes
Fault = Callable[[Submitted], None]


def one_task(job: Submitted) -> None:
    os.kill(job.ranks()[1], signal.SIGTERM)


def lost_task(job: Submitted) -> None:
    os.kill(job.ranks()[1], signal.SIGKILL)


def all_tasks(job: Submitted) -> None:
    call("scancel", "--signal=TERM", job.id)


def whole_job(job: Submitted) -> None:
    """The batch script and srun as well."""
    call("scancel", "--full", "--signal=TERM", job.id)


def requeue(job: Submitted) -> None:
    call("scontrol", "requeue", job.id)


def time_limit(job: Submitted) -> None:
    """Leaves the job four to five minutes, which is less than `WARNED`; a slow machine can save in them."""
    passed = call("squeue", "--noheader", f"--jobs={job.id}", "--format=%M").split("-")[-1].split(":")
    minutes = sum(int(number) * 60**power for power, number in enumerate(reversed(passed))) // 60
    call("scontrol", "update", f"JobId={job.id}", f"TimeLimit={minutes + 5}")
    job.wait(lambda: job.state() == "PENDING", "the requeue of a job whose time is over")
    call("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")


def preemption(job: Submitted) -> None:
    """By a job of a partition with a higher tier."""
    other = call(
        "sbatch", "--parsable", "--nodes=2", "--nodelist=dgx[03-04]", "--exclusive", "--output=/dev/null",
        "--wrap=sleep 1",
    )  # fmt: skip
    job.wait(lambda: not call("squeue", "--noheader", f"--jobs={other}", check=False), "the other job's end")


def node_failure(job: Submitted) -> None:
    call(TESTBED / "kill-node", "dgx04")
    job.wait(lambda: job.state() == "PENDING", "the requeue of a job whose node died")
    call(TESTBED / "start-node", "dgx04")


EVERYWHERE: tuple[Fault, ...] = (one_task, lost_task, all_tasks, whole_job, requeue)
ON_DGX03_AND_04: tuple[Fault, ...] = (preemption, time_limit, node_failure)  # in the partition `scavenge`
