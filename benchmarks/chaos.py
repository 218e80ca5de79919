"""Runs that are interrupted in every way, some fifty times under each strategy: the table of docs/reliability.md.

    make chaos                                          about two hours on two cores; goes on where it was stopped
    make chaos ARGS="--strategies fsdp,zero3 --rounds 1"
    make chaos ARGS="--strategies pipeline --rounds 1"  two stages
    make chaos ARGS="--accelerator cuda --ranks 8 --rounds 1 --faults 'SIGKILL of one rank;SIGSTOP of one rank'"

A round is one run that meets every fault once, in an order that its seed decides, and must end with the bits of the
undisturbed run: weights, optimizer state, every logged row. On two ranks, or on as many as `--ranks` says. The file
systems that fill up or become read-only are mounts, which need root; without, those two faults are left out.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tqdm import tqdm  # noqa: E402

from benchmarks.harness import results  # noqa: E402
from tests.harness.chaos import (  # noqa: E402
    FAULTS,
    HANG_SECONDS,
    MOUNTS,
    RANKS,
    SAVE_EVERY,
    STEPS,
    STRATEGIES,
    make_subject,
    may_mount,
    torment,
)


def tried(
    home: Path, strategy: str, seed: int, faults: list[str], accelerator: str, ranks: int, bar: tqdm[Any]
) -> dict[str, Any]:
    """One round: a run that meets every fault once."""
    order = random.Random(seed).sample(faults, len(faults))
    # The launcher restarts ranks in every second round, and saves are asynchronous in half of the rounds: four rounds
    # have all four combinations.
    how = {"in_place": seed % 2 == 1, "asynchronous": seed % 4 in (1, 2)}
    rows = []
    for found in torment(home, strategy, order, seed, accelerator=accelerator, ranks=ranks, **how):
        rows.append(dataclasses.asdict(found))
        if not found.survived:
            bar.write(f"{strategy}, seed {seed}, {found.fault}: {found.told}")
        bar.update()
    return {"strategy": strategy, "seed": seed, **how, "faults": rows}


def main() -> int:
    parser = results.command_line(__doc__, accelerator="cpu")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--rounds", type=int, default=4, help="runs of each strategy")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--faults", default=";".join(FAULTS), help="separated by semicolons")
    arguments = parser.parse_args()
    number = f"-x{arguments.ranks}" if arguments.ranks != RANKS else ""
    path = arguments.out / f"chaos-{arguments.accelerator}{number}.json"
    environment, _ = results.measured_on(arguments.accelerator, arguments.commit)
    result: dict[str, Any] = {
        "command": results.command(),
        "environment": environment,
        "settings": {
            "steps": STEPS,
            "save_every_n_steps": SAVE_EVERY,
            "hang_seconds": HANG_SECONDS[arguments.accelerator],
            "ranks": arguments.ranks,
        },
        "rounds": [],
    }
    before = json.loads(path.read_text()) if path.exists() else result
    if before["settings"] == result["settings"] and before["environment"]["commit"] == environment["commit"]:
        result["rounds"] = before["rounds"]
    done = {(one["strategy"], one["seed"]) for one in result["rounds"]}
    home = Path(tempfile.mkdtemp(prefix="chaos-"))
    make_subject(home)
    faults = [fault for fault in arguments.faults.split(";") if may_mount(home) or fault not in MOUNTS]
    todo = [(s, n) for n in range(arguments.rounds) for s in arguments.strategies.split(",") if (s, n) not in done]
    survived = True
    with tqdm(total=len(todo) * (len(faults) + 1), unit="fault") as bar:
        for strategy, seed in todo:
            found = tried(home, strategy, seed, faults, arguments.accelerator, arguments.ranks, bar)
            survived &= all(row["survived"] for row in found["faults"])
            result["rounds"].append(found | {"commit": environment["commit"]})
            results.write(path, result)
    if survived:
        shutil.rmtree(home)
    return 0 if survived else 1


if __name__ == "__main__":
    sys.exit(main())
