"""Saved under one strategy or layout and resumed under another: the matrices of docs/checkpointing.md.

    make checkpoint-matrix                                                     CPU, gloo: 1, 2, 4 and 8 ranks
    python benchmarks/checkpoint_matrix.py --accelerator cuda --ranks 1,2,4    NCCL
    python benchmarks/checkpoint_matrix.py --strategies '' --ranks 1,2         layouts of at most two ranks alone

Three steps, a checkpoint, and twenty more steps under the other strategy, compared with a plain loop that was never
interrupted. SGD with momentum and AdamW, two parameter groups, one of them with weight decay. Writes
benchmarks/results/resume-<device>.json as it goes.

The layouts of tensor, context and pipeline axes have a language model, AdamW and two steps before the checkpoint and
behind it. On the same layout, too, each goes on: that run is to have the bits of one that never stopped. Groups of
pairs run side by side where the machine has the cores. Writes benchmarks/results/layouts-<device>.json. Pairs of
layouts that held at this commit are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.limits import on_ranks  # noqa: E402
from tests.harness import layouts  # noqa: E402
from tests.harness.across import BOUND, FURTHER, NAMES, SAVED, resume_all, save_all, sides  # noqa: E402

PART = 48  # pairs that share a group of processes, times the ranks
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


def measure_strategies(arguments: argparse.Namespace, result: dict[str, Any], path: Path) -> None:
    optimizers, timeout = arguments.optimizers.split(","), arguments.timeout
    mine = [side for n in arguments.ranks for side in sides(arguments.strategies.split(";"), n)]
    result["settings"] = {"saved_after": SAVED, "further_steps": FURTHER, "bound": BOUND, "optimizers": optimizers}
    result["sides"] = [vars(side) for side in mine]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for n in dict.fromkeys(side.ranks for side in mine):
            of_n = [side for side in mine if side.ranks == n]
            on_ranks(n, save_all, folder, of_n, optimizers, arguments.accelerator, timeout_seconds=timeout)
        for n in dict.fromkeys(side.ranks for side in mine):
            pairs = list(itertools.product(mine, [side for side in mine if side.ranks == n]))
            for first in range(0, len(pairs), PART // n):
                part = pairs[first : first + PART // n]
                rows = resumed(n, part, folder, optimizers, arguments.accelerator, timeout)
                result["pairs"] += rows
                results.write(path, result)
                bad = [row for row in rows if "error" in row or row["loss"] > BOUND or row["update"] > 10 * BOUND]
                print(f"{len(result['pairs'])} cells, {time.monotonic() - began:.0f} s; not: {bad}", flush=True)


def measure_layouts(arguments: argparse.Namespace, result: dict[str, Any], path: Path) -> None:
    accelerator, timeout = arguments.accelerator, arguments.timeout
    before = results.earlier(path)
    if before and results.is_of_commit(before["environment"], result["environment"], arguments.commit):
        result["pairs"] = [row for row in before["pairs"] if row.get("holds")]
    done = {(row["saved"], row["resumed"]) for row in result["pairs"]}
    wanted = layouts.matrix_pairs(arguments.layouts.split(";"), arguments.ranks)
    pairs = [pair for pair in wanted if (pair.saved, pair.resumed) not in done]
    result["settings"] = {"saved_after": layouts.SAVED, "steps": layouts.STEPS, "bound": layouts.BOUND}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        straight: dict[str, list[Any]] = {}  # a layout → what each rank of a run that does not stop found
        for n in sorted({ranks_of(pair.saved) for pair in pairs}):
            names = dict.fromkeys(pair.saved for pair in pairs if ranks_of(pair.saved) == n)
            saving = [(name, True) for name in names]
            found = on_ranks(n, layouts.save_layouts, Path(folder), saving, accelerator, timeout_seconds=timeout)
            straight |= {name: [rank[name, True] for rank in found] for name in names}
        for n in sorted({ranks_of(pair.resumed) for pair in pairs}):
            of_n = [pair for pair in pairs if ranks_of(pair.resumed) == n]
            parts = [of_n[first : first + PART // n] for first in range(0, len(of_n), PART // n)]
            with ThreadPoolExecutor(groups_at_once(n)) as groups:
                going = [groups.submit(went_on, n, part, Path(folder), straight, accelerator, timeout)
                         for part in parts]  # fmt: skip
                for group in as_completed(going):
                    result["pairs"] += (rows := group.result())
                    results.write(path, result)
                    bad = [row for row in rows if not row.get("holds")]
                    print(f"{len(result['pairs'])} pairs, {time.monotonic() - began:.0f} s; not: {bad}", flush=True)


def groups_at_once(n: int) -> int:
    """How many groups of `n` ranks go on side by side, with four cores for each rank."""
    return min(4, max(1, (os.cpu_count() or 1) // (4 * n)))


def ranks_of(layout: str) -> int:
    return layouts.LAYOUTS[layout][0]


def went_on(
    n: int, part: list[layouts.Pair], folder: Path, straight: dict[str, list[Any]], accelerator: str, timeout: float
) -> list[dict[str, Any]]:
    """A row for each pair, on `n` ranks."""
    try:
        found = on_ranks(n, layouts.go_on, folder, part, accelerator, timeout_seconds=timeout)
    except AssertionError as error:
        print(str(error)[-3000:], flush=True)
        return [{"saved": pair.saved, "resumed": pair.resumed, "error": str(error)[-500:]} for pair in part]
    rows = []
    for pair, *ranks in zip(part, *found, strict=True):
        off = layouts.off_the_plain_loop(pair, ranks[0], accelerator)
        row = {"saved": pair.saved, "resumed": pair.resumed, "deviation": off}
        row["read_otherwise"] = different = layouts.unlike_saved(ranks[0])
        if pair.saved == pair.resumed:
            both = zip(straight[pair.saved], ranks, strict=True)
            row["unlike_straight"] = sorted({what for rank in both for what in layouts.unlike_straight(*rank)})
            different = different + row["unlike_straight"]
        rows.append(row | {"holds": off <= layouts.BOUND and not different})
    return rows


def main() -> None:
    parser = results.command_line(__doc__, accelerator="cpu")
    parser.add_argument("--ranks", type=results.numbers, default="1,2,4,8", help="comma-separated")
    parser.add_argument("--strategies", default=";".join(NAMES), help="separated by semicolons; '': none")
    parser.add_argument("--layouts", default=";".join(layouts.AXES), help="separated by semicolons; '': none")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS), help="of the strategies")
    parser.add_argument("--timeout", type=float, default=300, help=f"seconds for {PART} / ranks pairs")
    arguments = parser.parse_args()
    environment, device = results.measured_on(arguments.accelerator, arguments.commit)
    head = {"command": results.command(), "environment": environment}
    if arguments.strategies:
        measure_strategies(arguments, head | {"pairs": []}, arguments.out / f"resume-{device}.json")
    if arguments.layouts:
        measure_layouts(arguments, head | {"pairs": []}, arguments.out / f"layouts-{device}.json")


if __name__ == "__main__":
    main()
