"""How long a run needs from a dead rank to its next step, and the goodput that this gives at a kill every 30 minutes.

    python benchmarks/goodput.py                                   two GPUs: a small model, then llama3_1b
    python benchmarks/goodput.py --accelerator cpu --cells small

A run saves asynchronously, and its launcher may restart it (`max_restarts`). A rank is killed three times: behind the
first save, and twice when the run has gone on for 45 seconds, so that the ranks of the restart stand by. Measured
are the seconds from the kill to the next step that is made, in parts: until the launcher has ended the other ranks,
until the run starts again (the new ranks have built the model and loaded the checkpoint), until a step is made.

Goodput is the share of the time that makes steps which stay. At a kill every 30 minutes it lacks the restart; the
steps that a kill takes, which are half of those between two saves and those made while one is written; and what saves
hold up the training, the first one of a process more than the others. The time between two saves is the one that loses
least, and no shorter than a save takes.
"""

from __future__ import annotations

import csv
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.harness import results  # noqa: E402
from shardwise.run_dir.checkpoints import newest_whole  # noqa: E402
from shardwise.run_dir.events import read_events  # noqa: E402
from tests.harness.chaos import make_subject, words_for  # noqa: E402
from tests.harness.commands import Running  # noqa: E402
from tests.harness.patience import exit_code, wait_until  # noqa: E402

PERIOD = 1800.0  # seconds between two kills
WAITS = (0, 45, 45)  # seconds that the run goes on before each kill
SAVES = 4  # after the last one
CELLS: dict[str, tuple[int, list[str]]] = {  # name → steps between two saves, words
    "small": (90, []),
    "llama3_1b": (200, ["model=llama3_1b", "strategy=fsdp", "precision=bf16", "micro_batch_size=2", "runs_dir=runs",
                       "data.sequence_length=2048", "module.sample_tokens=0", "validate_every_n_steps=null",
                       "log_every_n_steps=1"]),
}  # fmt: skip


def words_of(cell: str, accelerator: str, ranks: int) -> list[str]:
    every, words = CELLS[cell]
    if words:
        words = [*words, f"accelerator={accelerator}", f"devices={ranks}", f"global_batch_size={2 * ranks}"]
    else:
        words = [*words_for("fsdp", accelerator, ranks, 1), "validate_every_n_steps=null"]
    return [*words, "max_steps=100000", "checkpoint.asynchronous=true", f"checkpoint.save_every_n_steps={every}",
            "checkpoint.keep_last=1", "checkpoint.monitor=null", f"max_restarts={len(WAITS)}",
            "name=goodput"]  # fmt: skip


def measure(home: Path, cell: str, accelerator: str, ranks: int) -> dict[str, Any]:
    words, run_dir, chance = words_of(cell, accelerator, ranks), home / "runs" / "goodput", random.Random(0)
    every = CELLS[cell][0]
    restarts = []
    os.environ["PAUSE"] = "0.05"
    with Running(home, cell, *words) as running:

        def text() -> str:
            return running.log.read_text()

        def wait(until: Callable[[], Any]) -> float:
            def is_there() -> bool:
                assert running.process.poll() is None, text()[-4000:]
                return bool(until())

            wait_until(is_there, "the run to go on", 120, lambda: text()[-4000:], pause=0.005)
            return time.time()

        def steps() -> int:
            return len(re.findall(r"^step \d+/\d", text(), re.MULTILINE))

        step_is_made = wait(lambda: f"step {every}/" in text())
        save_seconds = wait(lambda: newest_whole(run_dir)) - step_is_made
        newest = None
        for number, seconds in enumerate(WAITS, 1):
            began = time.time()
            wait(lambda began=began, seconds=seconds: time.time() > began + seconds)
            wait(lambda newest=newest: newest_whole(run_dir) != newest)  # two restarts that lose all end a run
            newest = newest_whole(run_dir)
            os.kill(chance.choice(list(running.ranks().values())), signal.SIGKILL)
            killed = time.time()
            wait(lambda n=number: f"restart {n} of" in text())
            told = steps()
            back = wait(lambda told=told: steps() > told)
            times = {one.kind: one.time for one in read_events(run_dir) if one.time > killed - 1}
            stood_by = any(
                b"SHARDWISE_STANDBY=" in Path(f"/proc/{pid}/environ").read_bytes() for pid in running.ranks().values()
            )
            restarts.append({"standby": stood_by, "seconds": back - killed, "ended": times["restart"] - killed,
                             "started": times["start"] - times["restart"], "step": back - times["start"]})  # fmt: skip
            print(json.dumps(restarts[-1]), flush=True)
        for _ in range(SAVES):  # by one process, whose first save holds up the training more than the others
            wait(lambda newest=newest: newest_whole(run_dir) != newest)
            newest = newest_whole(run_dir)
        told = steps()
        wait(lambda: steps() > told + 1)  # the step after the last save is in metrics.csv
        running.process.send_signal(signal.SIGTERM)
        code = exit_code(running.process, 300)
        assert code == 5, text()[-4000:]
        resumed = max(int(step) for step in re.findall(r"restart \d of \d, from step (\d+)", text()))
    return {"words": words, "restarts": restarts} | goodput(run_dir, every, resumed, restarts, save_seconds)


def goodput(
    run_dir: Path, every: int, resumed: int, restarts: list[dict[str, Any]], save_seconds: float
) -> dict[str, float]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        rows = {int(row["step"]): float(row["train/step_seconds"]) for row in csv.DictReader(file)
                if row["train/step_seconds"]}  # fmt: skip
    step = median(rows.values())
    behind = [max(0.0, rows[n] - step) for n in sorted(rows) if n % every == 1 and n > resumed + every]
    held_up, first = median(behind[1:]), behind[0]
    restart = mean(one["seconds"] for one in restarts if one["standby"])
    interval = max(save_seconds, sqrt(2 * PERIOD * held_up))
    lost = restart + first + interval / 2 + save_seconds + held_up * PERIOD / interval
    return {"step_seconds": step, "save_seconds": save_seconds, "held_up_seconds": held_up,
            "held_up_by_a_first_save_seconds": first, "measured_at_seconds_between_saves": every * step,
            "best_seconds_between_saves": interval, "goodput": 1 - lost / PERIOD}  # fmt: skip


def main() -> int:
    parser = results.command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cells", default=",".join(CELLS))
    arguments = parser.parse_args()
    environment, device = results.measured_on(arguments.accelerator, arguments.commit)
    path = arguments.out / f"goodput-{device}-x{arguments.ranks}.json"
    result: dict[str, Any] = {"command": results.command(), "environment": environment, "cells": {}}
    for cell in results.chosen(arguments.cells.replace(",", "|"), CELLS):
        with tempfile.TemporaryDirectory() as folder:
            make_subject(Path(folder))
            result["cells"][cell] = measure(Path(folder), cell, arguments.accelerator, arguments.ranks)
        print(f"{cell}: {json.dumps(result['cells'][cell], indent=1)}", flush=True)
        results.write(path, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
