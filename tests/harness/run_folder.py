"""Makes the folder of a run that never ran, of any length: what a report and a live view read."""

from __future__ import annotations

import csv
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.run_dir import files

START = 1_700_000_000.0
DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[: len(content) * 2 // 3 - 1],
    "garbage": lambda content: b"\xff\0{[,\n",
    # what a power failure leaves of a block, line ends of another system, and brackets that are not closed
    "holes": lambda content: content[:400] + b"\0" * 200_000 + b"\n1\r2\r\n" + b"[" * 100_000 + b"\n" + content[400:],
}
# What lies in place of a file: nobody writes into the pipe, and the other has no end that a reader could reach
ODD: dict[str, Callable[[Path], None]] = {"pipe": os.mkfifo, "sparse": lambda path: _sparse(path)}
TELEMETRY = ("gpu/power_watts", "gpu/temperature_celsius", "gpu/sm_clock_mhz", "gpu/utilization")


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def make_run(
    folder: Path, steps: int = 200, ranks: int = 4, *, every: int = 1, ends: int | None = 0, seed: int = 0,
    rank_rows: int = 500, config: str = "name: made\nmax_steps: 200\noptimizer:\n  lr: 0.001\n",
    telemetry: tuple[str, ...] = TELEMETRY, machine: dict[str, str] | None = None,
) -> Path:  # fmt: skip
    """Write a run's folder. `ends`: its exit code; None: it is killed. `rank_rows`: the most steps in ranks.csv."""
    folder.mkdir(parents=True)
    chance = random.Random(seed)
    (folder / files.CONFIG).write_text(config)
    topology = {"nodes": 1, "devices": ranks, "mesh": {"shard": ranks}}
    plan = {"run_id": folder.name, "strategy": {"name": "fsdp"}, "precision": {"name": "bf16"}, "max_steps": steps,
            "accelerator": "cuda", "topology": topology, "log_every_n_steps": every, "global_batch_size": 64,
            "module": {"_target_": "recipes.language_modeling.module.LanguageModel"}}  # fmt: skip
    (folder / files.PLAN).write_text(json.dumps(plan, indent=2))
    environment = {"python": "3.11.2", "hostname": "node-1", "packages": {"torch": "2.13.0", "wandb": None},
                   "gpus": ["NVIDIA H200"] * ranks, "commit": "0123abc"}  # fmt: skip
    (folder / files.ENVIRONMENT).write_text(json.dumps(environment))
    (folder / files.STARTS).write_text(json.dumps([START, START + 600.0]) + "\n")
    logged = [step for step in range(1, steps + 1) if step % every == 0 or step == 1]
    _write_metrics(folder, logged, ranks, chance, telemetry)
    if ranks > 1:
        _write_ranks(folder, logged[:: max(1, len(logged) // rank_rows)], ranks, chance, telemetry)
    middle = steps // 2
    command = ["python", "train.py", "strategy=fsdp", "name=a b"]
    events: list[tuple[float, str, int | None, str, dict[str, Any]]] = [
        (0.0, "command", None, "", {"command": command, "folder": "/home/me/my work", "launcher": "local",
                                    "locked": True, "machine": machine}),
        (5.0, "start", 0, "training starts", {"resume": None}),
        (300.0, "save", middle, f"step-{middle:08d}.ckpt is saved", {}),
        (500.0, "verdict", middle, "data-bound: rank 1 waits 12 % of the time; data.num_workers=8 would help", {}),
        (580.0, "error", None, "shardwise: rank 1 was killed by SIGKILL (out of memory?)", {}),
        (590.0, "restart", None, f"restart 1 of 2, from step {middle}", {"exit_code": 137}),
        (600.0, "start", middle, "training starts", {"resume": f"step-{middle:08d}.ckpt"}),
    ]  # fmt: skip
    if ends:
        text = "error: rank 2 has run out of memory\n  micro_batch_size=2 would need less"
        events.append((1199.0, "error", None, text, {"rank": 2}))
    if ends is not None:
        events.append((1200.0, "end", None, f"the run ended with exit code {ends}", {"exit_code": ends}))
    with (folder / files.EVENTS).open("w") as file:
        for seconds, kind, step, said, data in events:
            row = {"time": START + seconds, "kind": kind, "step": step, "text": said, "data": data}
            file.write(json.dumps(row) + "\n")
    if ends == 0:
        rates = {"samples_per_second": 640.0, "tokens_per_second": 655360.0}
        summary = {"steps": steps, "training_seconds": 1000.0, "step_seconds": 0.1, "mfu": 0.41, "data_wait": 0.02,
                   "goodput": 0.8, "peak_memory_gib": 70.5, **rates}  # fmt: skip
        (folder / files.SUMMARY).write_text(json.dumps(summary, indent=2))
    for step in (middle, steps):
        checkpoint = files.checkpoint_path(folder, step)
        checkpoint.mkdir(parents=True)
        (checkpoint / files.MANIFEST).write_text('{"files": {}, "format": 2}')
    return folder


def _write_metrics(
    folder: Path, logged: list[int], ranks: int, chance: random.Random, telemetry: tuple[str, ...]
) -> None:
    ends = ("", "_min", "_min_rank", "_max", "_max_rank") if ranks > 1 else ("",)
    fields = ["step", "train/loss", "train/gradient_norm", "train/learning_rate", "train/step_seconds",
              "train/samples_per_second", "train/tokens_per_second", "train/mfu", "train/data_wait", "train/goodput",
              "train/memory_allocated_gib", "train/memory_reserved_gib", "train/samples", "train/training_seconds",
              *(f"{name}{end}" for name in telemetry for end in ends), "validation/loss"]  # fmt: skip
    validate = max(1, len(logged) // 10)
    with (folder / files.METRICS).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(fields)
        for number, step in enumerate(logged):
            loss = 3 + 8 * math.exp(-8 * number / len(logged)) + chance.gauss(0, 0.1)
            row = [step, loss, abs(chance.gauss(1, 0.2)), 1e-3 * (1 - step / (logged[-1] + 1)),
                   0.1 + chance.random() / 99,
                   640 + chance.gauss(0, 9), 655360 + chance.gauss(0, 999), 0.41, chance.random() / 20, 0.8, 60.0, 70.5,
                   step * 64, step * 0.1]  # fmt: skip
            for place in range(len(telemetry)):
                mean = 100.0 * (place + 1) + chance.gauss(0, 2)
                row += [mean, mean - 9, chance.randrange(ranks), mean + 9, chance.randrange(ranks)][: len(ends)]
            writer.writerow([*row, loss + 0.1 if number % validate == validate - 1 else ""])


def _write_ranks(
    folder: Path, logged: list[int], ranks: int, chance: random.Random, telemetry: tuple[str, ...]
) -> None:
    with (folder / files.RANKS).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "time", "rank", "train/data_wait", *telemetry])
        for step in logged:
            for rank in range(ranks):
                values = [f"{100.0 * (n + 1) + rank + chance.gauss(0, 2):.6g}" for n in range(len(telemetry))]
                writer.writerow([step, f"{START + step / 10:.1f}", rank, f"{chance.random() / 20:.6g}", *values])
