"""A hundred random kills, requeues, preemptions, time limits and lost nodes under a real Slurm: docs/reliability.md.

    python benchmarks/slurm_chaos.py                about an hour on two cores; root, on Debian or Ubuntu
    python benchmarks/slurm_chaos.py --faults 10    of each job

Two jobs of two nodes each, on the testbed of four emulated nodes (slurm/testbed/README.md), meet one fault after the
other, each at a random step. In the end both jobs must be done, and the tensors of the last checkpoint and every row
of the log must have the bits of a run that met none.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tqdm import tqdm  # noqa: E402

from benchmarks.harness import results  # noqa: E402
from tests.harness.chaos import Trouble, compare, make_subject  # noqa: E402
from tests.harness.commands import check, run  # noqa: E402
from tests.harness.slurm_jobs import EVERYWHERE, ON_DGX03_AND_04, WARNED, Fault, Submitted, testbed, words  # noqa: E402

STEPS = 15  # to the next fault, at most; a save comes every five
TO_A_TIME_LIMIT = 40  # steps that a fault takes in the mean until it strikes: a time limit does so within a minute
JOBS: dict[str, tuple[list[str], tuple[Fault, ...]]] = {
    "signalled": (["--nodelist=dgx[01-02]"], EVERYWHERE),
    "withdrawn": (["--nodelist=dgx[03-04]", "--partition=scavenge"], (*EVERYWHERE, *ON_DGX03_AND_04)),
}


def steps_of(faults: int) -> int:
    return (STEPS + TO_A_TIME_LIMIT) * (faults + 1)


def torment(home: Path, name: str, faults: int, bar: tqdm[Any]) -> dict[str, Any]:
    """One job, from its start to its end."""
    options, kinds = JOBS[name]
    chance, met = random.Random(name), []
    job = Submitted(
        home, ["--nodes=2", f"--signal=USR2@{WARNED}", *options], *words(steps_of(faults), 5), f"name={name}",
        "preflight=false", PAUSE="0.05",
    )  # fmt: skip
    job.wait(job.step, "a step")
    for _ in range(faults):
        at = job.step() + chance.randrange(6, STEPS)
        job.wait(lambda at=at: job.step() >= at or job.state() == "COMPLETED", f"step {at}")
        if job.state() == "COMPLETED":
            break
        fault, starts, struck = chance.choice(kinds), job.starts(), time.monotonic()
        fault(job)
        job.wait(lambda starts=starts: job.starts() > starts and job.step(), f"a step after {fault.__name__}")
        met.append({"fault": fault.__name__, "step": at, "seconds": round(time.monotonic() - struck, 1)})
        bar.update()
    return {"faults": met, "end": job.wait_for_end(), "starts": job.starts()}


def main() -> int:
    parser = results.command_line(__doc__, accelerator=None)
    parser.add_argument("--faults", type=int, default=50, help="of each job")
    arguments = parser.parse_args()
    environment, _ = results.measured_on("cpu", arguments.commit)
    result: dict[str, Any] = {"command": results.command(), "environment": environment, "jobs": {}}
    with tempfile.TemporaryDirectory() as folder, testbed() as slurm:
        os.environ |= slurm
        home = Path(folder)
        make_subject(home)
        check(run(home, *words(steps_of(arguments.faults), 5), "devices=2", "name=undisturbed", timeout=900))
        with tqdm(total=len(JOBS) * arguments.faults, unit="fault") as bar, ThreadPoolExecutor() as threads:
            found = threads.map(lambda name: torment(home, name, arguments.faults, bar), JOBS)
            result["jobs"] = dict(zip(JOBS, found, strict=True))
        for name, job in result["jobs"].items():
            try:
                compare(home / "runs" / name, home / "runs" / "undisturbed")
                job["differs"] = None
            except Trouble as trouble:
                job["differs"] = str(trouble)
            print(f"{name}: {len(job['faults'])} faults, {job['end']}, {job['differs'] or 'the same bits'}", flush=True)
    results.write(arguments.out / "slurm-chaos-cpu-x4.json", result)
    return int(any(job["end"] != "COMPLETED" or job["differs"] for job in result["jobs"].values()))


if __name__ == "__main__":
    sys.exit(main())
