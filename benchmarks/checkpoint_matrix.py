"""Saved under every strategy and resumed under every other: the matrix of docs/checkpointing.md.

    make checkpoint-matrix                                                     CPU, gloo: 1, 2 and 4 ranks
    python benchmarks/checkpoint_matrix.py --accelerator cuda --ranks 1,2,4    NCCL

Three steps, a checkpoint, and twenty more steps under the other strategy, compared with a plain loop that was never
interrupted. SGD with momentum and AdamW, two parameter groups, one of them with weight decay. Writes
benchmarks/results/resume-<device>.json as it goes.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.limits import on_ranks  # noqa: E402
from tests.harness.across import BOUND, FURTHER, NAMES, SAVED, resume_all, save_all, sides  # noqa: E402

PART = 24  # pairs that share a group of processes
OPTIMIZERS = ["sgd", "adamw"]


def resumed(
    n: int, part: list[tuple[Any, Any]], folder: Path, optimizers: list[str], accelerator: str, timeout: float
) -> list[dict[str, Any]]:
    """A row for each pair and optimizer, on `n` ranks."""
    try:
        found = on_ranks(n, resume_all, folder, part, optimizers, accelerator, timeout_seconds=timeout)[0]
    except AssertionError as error:
        print(str(error)[-3000:], flush=True)
        return [{"saved": vars(a), "resumed": vars(b), "error": str(error)[-500:]} for a, b in part]
    return [
        {"saved": vars(a), "resumed": vars(b), "optimizer": optimizer, **measured}
        for (a, b, optimizer), measured in found.items()
    ]


def main() -> None:
    parser = results.command_line(__doc__, accelerator="cpu")
    parser.add_argument("--ranks", type=results.numbers, default="1,2,4", help="comma-separated")
    parser.add_argument("--strategies", default=";".join(NAMES), help="separated by semicolons")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--timeout", type=float, default=300, help=f"seconds for {PART} pairs")
    arguments = parser.parse_args()
    optimizers, timeout = arguments.optimizers.split(","), arguments.timeout
    mine = [side for n in arguments.ranks for side in sides(arguments.strategies.split(";"), n)]
    environment, device = results.measured_on(arguments.accelerator, arguments.commit)
    result: dict[str, Any] = {
        "command": results.command(),
        "environment": environment,
        "settings": {"saved_after": SAVED, "further_steps": FURTHER, "bound": BOUND, "optimizers": optimizers},
        "sides": [vars(side) for side in mine],
        "pairs": [],
    }
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for n in arguments.ranks:
            of_n = [side for side in mine if side.ranks == n]
            on_ranks(n, save_all, folder, of_n, optimizers, arguments.accelerator, timeout_seconds=timeout)
        for n in arguments.ranks:
            pairs = list(itertools.product(mine, [side for side in mine if side.ranks == n]))
            for first in range(0, len(pairs), PART):
                part = pairs[first : first + PART]
                rows = resumed(n, part, folder, optimizers, arguments.accelerator, timeout)
                result["pairs"] += rows
                results.write(arguments.out / f"resume-{device}.json", result)
                bad = [row for row in rows if "error" in row or row["loss"] > BOUND or row["update"] > 10 * BOUND]
                print(f"{len(result['pairs'])} cells, {time.monotonic() - began:.0f} s; not: {bad}", flush=True)


if __name__ == "__main__":
    main()
