"""Saved under every strategy and gone on with under every other: the matrix of docs/checkpointing.md.

    make checkpoint-matrix                                                     CPU, gloo: 1, 2 and 4 ranks
    python benchmarks/checkpoint_matrix.py --accelerator cuda --ranks 1,2,4    NCCL

Three steps, a checkpoint, twenty further steps elsewhere; beside a plain loop that was never interrupted. SGD with
momentum and AdamW, two groups of which one decays. Writes benchmarks/results/resume-<device>.json as it goes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])

from benchmarks.machine import measured_on  # noqa: E402
from tests.harness.across import BOUND, FURTHER, NAMES, SAVED, resume_all, save_all, sides  # noqa: E402
from tests.harness.processes import spawn  # noqa: E402

PART = 24  # pairs that share a group of processes
OPTIMIZERS = ["sgd", "adamw"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=["cuda", "cpu"], default="cpu")
    parser.add_argument("--ranks", default="1,2,4", help="comma-separated")
    parser.add_argument("--strategies", default=";".join(NAMES), help="separated by semicolons")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--timeout", type=float, default=300, help=f"seconds for {PART} pairs")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--commit", help="of this code, where it was copied without its history")
    arguments = parser.parse_args()
    ranks, optimizers = [int(n) for n in arguments.ranks.split(",")], arguments.optimizers.split(",")
    mine = [side for n in ranks for side in sides(arguments.strategies.split(";"), n)]
    environment, device = measured_on(arguments)
    result: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/checkpoint_matrix.py", *sys.argv[1:]]),
        "environment": environment,
        "settings": {"saved_after": SAVED, "further_steps": FURTHER, "bound": BOUND, "optimizers": optimizers},
        "sides": [vars(side) for side in mine],
        "pairs": [],
    }
    path = arguments.out / f"resume-{device}.json"
    arguments.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for n in ranks:
            of_n = [side for side in mine if side.ranks == n]
            spawn(n, save_all, folder, of_n, optimizers, arguments.accelerator, timeout_seconds=arguments.timeout)
        for n in ranks:
            pairs = list(itertools.product(mine, [side for side in mine if side.ranks == n]))
            for first in range(0, len(pairs), PART):
                part = pairs[first : first + PART]
                try:
                    found = spawn(n, resume_all, folder, part, optimizers, arguments.accelerator,
                                  timeout_seconds=arguments.timeout)[0]  # fmt: skip
                    rows = [
                        {"saved": vars(a), "resumed": vars(b), "optimizer": optimizer, **measured}
                        for (a, b, optimizer), measured in found.items()
                    ]
                except AssertionError as error:
                    print(str(error)[-3000:], flush=True)
                    rows = [{"saved": vars(a), "resumed": vars(b), "error": str(error)[-500:]} for a, b in part]
                result["pairs"] += rows
                path.write_text(json.dumps(result, indent=1) + "\n")
                bad = [row for row in rows if "error" in row or row["loss"] > BOUND or row["update"] > 10 * BOUND]
                print(f"{len(result['pairs'])} cells, {time.monotonic() - began:.0f} s; not: {bad}", flush=True)


if __name__ == "__main__":
    main()
