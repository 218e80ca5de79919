"""The race: Llama 3 here and in torchtitan on the same GPUs, in turn, cell by cell, with a card for each run.

    python benchmarks/race.py --ranks 1            Llama 1.5 B on one GPU
    python benchmarks/race.py --ranks 2            Llama 3 8 B on two GPUs, under fsdp, and each axis; 4 and 8 likewise
    python benchmarks/race.py --ranks 1 --only 'fp8' --again       some cells; runs of this commit are made again
    python benchmarks/race.py --ranks 1 --breakdown                our fastest step of each cell, profiled
    python benchmarks/race.py --accelerator cpu --tiny             tries it out anywhere

A run of ours is `python train.py` as a user would start it; a run of torchtitan is its own launcher, on the same random
tokens, sequences of 8,192, fp32 masters, AdamW, clipping at 1.0. Each cell has several runs of ours: words among which
a user would choose. Writes benchmarks/results/race-<gpu>-x<ranks>.json after every run; a run that this commit has a
card of is left out. Where torchtitan is not installed, ours run alone.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.harness import commands, results, roofline, titan  # noqa: E402
from benchmarks.harness.data import RANDOM_TOKENS  # noqa: E402
from benchmarks.harness.gpus import GpuWatch, describe_gpus  # noqa: E402
from benchmarks.harness.kernels import costliest  # noqa: E402
from benchmarks.harness.race_cells import MODELS, STEPS, axes_in, cells_on, flags_of, with_defaults  # noqa: E402
from benchmarks.harness.trainers import TINY_LANGUAGE_MODEL  # noqa: E402
from benchmarks.pages import performance  # noqa: E402
from shardwise.config.compose import compose  # noqa: E402
from shardwise.run_dir.files import METRICS, PLAN, SUMMARY, profile_folder, profile_trace, read_rows  # noqa: E402

EVERY = 4  # a line of both logs has the mean of four steps
PROFILED = 12
ENOUGH = 60  # seconds: with less left of --within, no run begins
LENGTH = 8192
ALWAYS = [*RANDOM_TOKENS, "optimizer.lr=1e-4", "gradient_clip_val=1.0", f"log_every_n_steps={EVERY}"]
TINY = [  # with a layer for each of two chunks of two stages
    *(word for word in TINY_LANGUAGE_MODEL if not word.startswith(("micro", "model.n_layers"))), "model.n_layers=4",
    "compile=none", "compile.recompute_elementwise=false", "attention=auto", "loss=auto",
]  # fmt: skip
TINY_FP8 = ["precision.fp8.emulate=true", "precision.fp8.min_features=16"]


@dataclass(frozen=True)
class Run:
    """`flags`: torchtitan's; None: a run of ours. `size`: of the model."""

    cell: str
    size: str
    who: str
    words: str
    flags: str | None = None

    @property
    def steps(self) -> tuple[int, int]:
        """Those of the warm-up, and all."""
        return STEPS[self.size]

    @property
    def key(self) -> dict[str, str]:
        return {"cell": self.cell, "who": self.who, "words": self.words}


class Race:
    """The runs on one number of GPUs, and the file with their cards."""

    def __init__(self, options: Any) -> None:
        self.options, self.ranks = options, options.ranks
        self.environment, device = results.measured_on(options.accelerator, options.commit)
        self.path = options.out / f"race-{device}-x{self.ranks}{'-tiny' if options.tiny else ''}.json"
        read = itemgetter("cell", "who", "words", "commit", "machine")  # of a card, and of a breakdown
        before = results.earlier(self.path, lambda had: list(map(read, [*had["cards"], *had["breakdowns"].values()])))
        cells = cells_on(self.ranks)
        only = results.chosen(options.only, (cell.name for cell in cells))
        self.cells = [cell for cell in cells if cell.name in only]
        self.machine = describe_gpus(options.accelerator, self.ranks)
        self.watch = GpuWatch(options.accelerator, self.ranks)
        self.deadline, self.failed = time.monotonic() + options.within, False
        self.result: dict[str, Any] = {
            "command": f"python benchmarks/race.py --ranks {self.ranks}", "ranks": self.ranks, "tiny": options.tiny,
            "words": ALWAYS, "models": MODELS, "environment_variables": titan.ENVIRONMENT,
            "ceilings": roofline.CEILINGS, "steps": STEPS, "every": EVERY,
            "cells": {cell.name: cell.best_of for cell in cells},
            "cards": before.get("cards", []), "breakdowns": before.get("breakdowns", {}),
        }  # fmt: skip

    def runs(self) -> list[Run]:
        """In turn: torchtitan's run of a cell, then ours."""
        peer = titan.version() if self.options.accelerator == "cuda" else None
        if peer is None:
            print("torchtitan is not installed, or there is no GPU: ours run alone", flush=True)
        found = []
        for cell in self.cells:
            for flags in (flags_of(*run) for run in cell.theirs) if peer is not None else ():
                found.append(Run(cell.name, cell.size, f"torchtitan {peer}", flags, flags))
            found += [Run(cell.name, cell.size, "ours", with_defaults(words)) for words in cell.ours]
        return found

    def has_card(self, run: Run) -> bool:
        return any(is_final(card) and self.is_of_now(card) for card in self.result["cards"] if is_of(card, run))

    def is_of_now(self, card: dict[str, Any]) -> bool:
        """Of this commit and these GPUs."""
        same = results.is_of_commit(card, self.environment, self.options.commit)
        return same and bool(card["machine"] == self.machine)

    def make(self, run: Run) -> bool:
        """A run and its card. False: too little time is left for it."""
        left = self.deadline - time.monotonic()
        if left < ENOUGH:
            return False
        began, limit = time.monotonic(), min(left, self.options.timeout)
        with tempfile.TemporaryDirectory() as folder:
            found = (self.ours if run.flags is None else self.theirs)(run, Path(folder), limit)
        seconds = round(time.monotonic() - began, 1)
        if found.get("exit_code") == commands.TOO_LONG and left < self.options.timeout:
            return False
        card = run.key | {"size": run.size} | found | {"seconds": seconds, "commit": self.environment["commit"],
                                  "environment": self.environment, "machine": self.machine}  # fmt: skip
        self.failed |= not is_final(card)
        had = [old for old in self.result["cards"] if is_of(old, run)]
        if is_final(card) or not any(map(is_final, had)):  # a run that failed takes no card away
            self.result["cards"] = [*(old for old in self.result["cards"] if not is_of(old, run)), card]
            results.write(self.path, self.result)
        print(f"{run.cell}: {run.who}, {run.words}: {in_words(card)}  ({seconds} s)", flush=True)
        return True

    def ours(self, run: Run, folder: Path, limit: float, more: tuple[str, ...] = ()) -> dict[str, Any]:
        given = self.words_of(run, *more)
        line = [*given, f"accelerator={self.options.accelerator}", f"runs_dir={folder}", "name=ours"]
        code, felt = self.watched([sys.executable, str(ROOT / "train.py"), *line], folder / "log", limit, run.steps)
        found = {"command": shlex.join(["python", "train.py", *given]), "limit": roofline.limit(work_of(given))}
        ran = folder / "ours"
        rows = [row for row in read_rows(ran / METRICS) if row.get("train/step_seconds")]
        if code or not rows or not (ran / SUMMARY).exists():
            return found | commands.failure(code, limit, folder / "log")
        plan, summary = (json.loads((ran / name).read_text()) for name in (PLAN, SUMMARY))
        timed = [row for row in rows if int(row["step"]) > run.steps[0]]
        return found | self.speed(plan["global_batch_size"] * plan["data"]["sequence_length"] / self.ranks, {
            "steps_ms": [round(float(row["train/step_seconds"]) * 1e3, 3) for row in timed],
            "peak_reserved_gib": summary["peak_memory_gib"],
            "losses": [float(row["train/loss"]) for row in rows],
        }) | {
            "gpu": felt, "first_step_seconds": summary["first_step_seconds"], "kernels": summary["attention"],
            "plan": {name.removeprefix("chosen_"): plan[name] for name in
                     ("precision", "chosen_loss", "chosen_attention", "compile", "activation_checkpointing")},
        }  # fmt: skip

    def theirs(self, run: Run, folder: Path, limit: float) -> dict[str, Any]:
        flags = (run.flags or "").split()
        tokens = int(flags[1]) * LENGTH / axes_in(run.flags or "")
        given = ["--model.flavor", run.size, "--training.seq_len", str(LENGTH),
                 "--training.steps", str(run.steps[1]), "--metrics.log_freq", str(EVERY), *flags]  # fmt: skip
        line = titan.command(self.ranks, given, folder)
        code, felt = self.watched(line, folder / "log", limit, run.steps)
        found = {"command": shlex.join(["python", *line[1:]]).replace(str(folder), "FOLDER")}
        said = titan.read_log((folder / "log").read_text(errors="replace"), run.steps[0], tokens)
        if code or not said:
            return found | commands.failure(code, limit, folder / "log")
        return found | self.speed(tokens, said) | {"gpu": felt}

    def speed(self, tokens: float, measured: dict[str, Any]) -> dict[str, Any]:
        ms = median(measured["steps_ms"])
        return {"ms_per_step": ms, "tokens_per_second_per_gpu": round(tokens / ms * 1e3, 1)} | measured

    def words_of(self, run: Run, *more: str) -> list[str]:
        tiny = [*TINY, *(TINY_FP8 if "fp8" in run.words else [])] if self.options.tiny else []
        if tiny and self.options.accelerator == "cpu" and "strategy.symmetric_memory" in run.words:
            tiny.append("strategy.symmetric_memory=false")
        micro = int(re.findall(r"micro_batch_size=(\d+)", run.words)[0])
        batch = f"global_batch_size={micro * self.ranks // axes_in(run.words)}"
        return [*MODELS[run.size], *ALWAYS, f"max_steps={run.steps[1]}", f"devices={self.ranks}", batch,
                *run.words.split(), *tiny, *more]  # fmt: skip

    def watched(
        self, command: list[str], log: Path, limit: float, steps: tuple[int, int]
    ) -> tuple[int, dict[str, float]]:
        """The exit code, and what the GPUs felt in the timed steps, which the log tells as they pass."""
        seen: dict[str, dict[str, float]] = {}

        def look() -> None:
            told = re.findall(r"\bstep:? +(\d+)", log.read_text(errors="replace"))
            if told and int(told[-1]) >= steps[0] and "begin" not in seen:
                self.watch.begin()
                seen["begin"] = {}
            if told and int(told[-1]) >= steps[1] and "end" not in seen:
                seen["end"] = self.watch.end()

        return commands.run(command, log, limit, look, titan.ENVIRONMENT), seen.get("end", {})

    def break_down(self) -> None:
        """Profile one step of the fastest recorded run of ours in each cell, and set its parts beside their limits."""
        found = (performance.fastest(self.result, cell.name, is_ours=True) for cell in self.cells)
        runs = dict.fromkeys(Run(c["cell"], c["size"], "ours", c["words"]) for c in found if c is not None)
        if not runs:
            sys.exit("no run of ours is recorded: run this without --breakdown first")
        for run in runs:
            before = self.result["breakdowns"].get(run.cell, {"words": None})
            is_there = before["words"] == run.words and self.is_of_now(before)
            if is_there and not self.options.again:
                print(f"{run.cell}: {run.words}: this commit has its breakdown", flush=True)
            elif (left := self.deadline - time.monotonic()) < ENOUGH:
                print(f"the time is over before {run.cell}; the same command goes on there")
                return
            else:
                print(f"{run.cell}: {run.words}", flush=True)
                self.profile(run, min(left, self.options.timeout))

    def profile(self, run: Run, limit: float) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            found = self.ours(run, folder, limit, (f"profile.start={PROFILED}",))
            profile = profile_folder(folder / "ours", PROFILED)
            if not (profile / SUMMARY).exists():
                print(f"the profile was not written: {found.get('error', 'the reader left nothing')}", flush=True)
                self.failed = True
                return
            parts = roofline.beside_limits(json.loads((profile / SUMMARY).read_text()), found["limit"]["parts_ms"])
            parts["kernels"] = costliest(profile_trace(profile, 0))
        where = {"commit": self.environment["commit"], "environment": self.environment, "machine": self.machine}
        self.result["breakdowns"][run.cell] = run.key | parts | where
        results.write(self.path, self.result)
        for part in parts["parts"]:
            print(f"{part['part']:24} {part['ms']:8.2f} ms, at best {part['limit_ms']:8.2f}", flush=True)


def is_of(card: dict[str, Any], run: Run) -> bool:
    return all(card[key] == value for key, value in run.key.items())


def is_final(card: dict[str, Any]) -> bool:
    """Whether nobody need make the run again: it was measured, or does not fit into memory."""
    return card.get("error") in (None, commands.NO_MEMORY)


def work_of(words: list[str]) -> roofline.Work:
    config = compose(words).jobs[0].config
    assert config.data is not None
    checkpointing, in_16_bits = config.activation_checkpointing, config.precision.name == "bf16_true"
    ranks, in_8_bits = int(config.devices or 1), "8bit" in str(config.optimizer)
    return roofline.Work(
        config.module["model"], config.global_batch_size / ranks, config.data["sequence_length"],
        shards=1 if config.strategy.name == "ddp" else getattr(config.strategy, "shard_size", None) or ranks,
        optimizer_bytes=roofline.update_bytes(in_8_bits=in_8_bits, weights_in_16_bits=in_16_bits),
        fp8=config.precision.name == "fp8",
        recompute=checkpointing.name, recomputed_layers=1 / checkpointing.every_n_layers,
    )  # fmt: skip


def in_words(card: dict[str, Any]) -> str:
    if "error" in card:
        return str(card["error"])
    peak, felt = card["peak_reserved_gib"], card["gpu"]
    memory = f", {peak:.1f} GiB" if peak else ""
    power = f", {felt['power_watts']:.0f} W, {felt['sm_clock_mhz']:.0f} MHz" if "power_watts" in felt else ""
    first, *_, last = card["losses"]
    return f"{card['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU{memory}{power}, losses {first:.3f} … {last:.3f}"


def main() -> None:
    parser = results.command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2, 4, 8))
    parser.add_argument("--tiny", action="store_true", help="a small model, for trying it out")
    parser.add_argument("--only", default="", help="a regular expression: cells to run, the others stay as recorded")
    parser.add_argument("--again", action="store_true", help="runs that this commit has a card of are made again")
    parser.add_argument("--timeout", type=results.seconds, default=240, help="seconds for one run")
    parser.add_argument("--within", type=results.seconds, default=1e9, help="seconds for all; again for the rest")
    parser.add_argument("--breakdown", action="store_true", help="a profile of our fastest recorded run of each cell")
    options = parser.parse_args()
    results.end_on_signals()
    race = Race(options)
    try:
        if options.breakdown:
            race.break_down()
        for run in [] if options.breakdown else race.runs():
            if not options.again and race.has_card(run):
                print(f"{run.cell}: {run.who}, {run.words}: this commit has its card", flush=True)
            elif not race.make(run):
                print(f"the time is over before {run.cell}: {run.who}, {run.words}; the same command goes on there")
                break
    finally:
        race.watch.stop()
    if race.failed:
        sys.exit("error: a run failed, see above; the same command makes it again")


if __name__ == "__main__":
    main()
