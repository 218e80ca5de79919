"""Checks on GPUs what a profile is there: it adds up, changes no bit, tells of a starved loader, and reads memory.

    python benchmarks/gpu_checks/profiling.py                                 on two GPUs: ddp, fsdp, zero3; minutes
    python benchmarks/gpu_checks/profiling.py --devices 1                     on one GPU
    python benchmarks/gpu_checks/profiling.py --keep tests/golden/traces      keeps the traces, each below 1 MB

Each cell is a run of train.py. Prints a line for each check, and exits with 1 if one fails.
`--accelerator cpu --devices 2` tries it out anywhere, where memory and synchronisation are left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.harness.commands import environment_of_commands  # noqa: E402
from shardwise.run_dir.files import METRICS, SUMMARY, profile_folder, profile_memory, profile_trace, read_rows  # noqa: E402
from shardwise_tools.traces import ProfileSummary  # noqa: E402
from tests.harness.faults import SLOW  # noqa: E402

STEP = 12
WORDS = [
    "model=llama3_1b", "model.n_layers=2", "model.vocab_size=8192", "data.sequence_length=1024", "precision=bf16",
    "micro_batch_size=1", "max_steps=16", "schedule=none", "checkpoint=none", "max_validation_batches=0",
    "module.sample_tokens=0", "log_every_n_steps=1", "deterministic=true",
]  # fmt: skip
TINY = ["model.dim=64", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=2", "model.ffn_dim=96",
        "model.max_seq_len=64", "model.vocab_size=256", "data.sequence_length=64", "micro_batch_size=1",
        "max_steps=16", "schedule=none", "checkpoint=none", "max_validation_batches=0", "module.sample_tokens=0",
        "log_every_n_steps=1"]  # fmt: skip
STARVED = ["recipe=custom", "module._target_=tests.harness.faults.Faulty", "units=[Linear]", "micro_batch_size=1",
           "data._target_=tests.harness.faults.FaultyData", "+data.fault=data", "max_steps=16", "checkpoint=none",
           "log_every_n_steps=1"]  # fmt: skip
MOST_BYTES = 2**20


@dataclass
class Checks:
    arguments: argparse.Namespace
    folder: Path
    failed: list[str] = field(default_factory=list)

    def check(self, what: str, holds: bool, found: object) -> None:
        print(f"{'ok    ' if holds else 'FAILED'} {what}: {found}", flush=True)
        if not holds:
            self.failed.append(what)

    def run(self, name: str, *words: str, model: list[str] | None = None) -> Path:
        """A run of train.py; its folder."""
        model = model or (TINY if self.arguments.accelerator == "cpu" else WORDS)
        command = [
            sys.executable, str(ROOT / "train.py"), *model, f"devices={self.arguments.devices}",
            f"global_batch_size={2 * self.arguments.devices}", f"accelerator={self.arguments.accelerator}",
            f"runs_dir={self.folder}", f"name={name}", *words,
        ]  # fmt: skip
        done = subprocess.run(
            command, cwd=ROOT, env=environment_of_commands(), capture_output=True, text=True, check=False
        )
        self.check(f"{name} runs", done.returncode == 0, done.stderr[-500:] or "exit code 0")
        return self.folder / name

    def strategy(self, name: str) -> None:
        """A profile under one strategy adds up, has kinds for its kernels, and leaves the losses as they are."""
        on_gpu = self.arguments.accelerator == "cuda"
        words = [f"profile.start={STEP}", "profile.ranks=all", *(["profile.memory=true"] if on_gpu else [])]
        plain, profiled = self.run(f"{name}-plain", f"strategy={name}"), self.run(name, f"strategy={name}", *words)
        self.check(f"{name}: the same losses", losses(plain) == losses(profiled), f"{len(losses(plain))} of them")
        folder = profile_folder(profiled, STEP)
        summary = ProfileSummary.from_json((folder / SUMMARY).read_text())
        step = summary.step
        parts = step.compute_ms + step.exposed_communication_ms + step.copies_alone_ms + step.idle_ms
        self.check(
            f"{name}: adds up to 1 %", abs(parts / step.span_ms - 1) < 0.01, f"{parts:.2f}, {step.span_ms:.2f} ms"
        )
        self.check(f"{name}: kernels have kinds", summary.other_share < 0.05, f"{summary.other_share:.1%} without")
        phases = {phase.name for phase in summary.phases}
        self.check(f"{name}: phases", {"data", "forward", "backward", "optimizer"} <= phases, sorted(phases))
        if on_gpu:
            memory = json.loads(profile_memory(folder, 0).read_text())
            held = {key: size for key, size in memory["at_peak"].items() if size}
            self.check(f"{name}: memory", {"parameters", "optimizer", "activations"} <= held.keys(), held)
            other = held.get("other", 0) / max(1, memory["peak_bytes"])
            self.check(f"{name}: less than 10 % of the peak has no category", other < 0.1, f"{other:.1%}")
        self.keep(name, profile_trace(folder, 0))

    def starved(self) -> None:
        """A loader that takes 60 ms for a sample: the wait for it is told."""
        folder = self.run("starved", "strategy=ddp", f"profile.start={STEP}", model=STARVED)
        step = ProfileSummary.from_json((profile_folder(folder, STEP) / SUMMARY).read_text()).step
        self.check("starved: the wait for data is told", step.waiting_for_data_ms > 1600 * SLOW, step)
        self.keep("starved", profile_trace(profile_folder(folder, STEP), 0))

    def synchronizations(self, *switch: str) -> None:
        """A step waits for the device as often with every telemetry as without."""
        counts = {}
        for word in switch:
            folder = self.run(word.replace("=", "-").replace(".", "-"), f"profile.start={STEP}", word)
            trace = gzip.decompress(profile_trace(profile_folder(folder, STEP), 0).read_bytes()).decode()
            counts[word] = trace.count('"cudaStreamSynchronize"') + trace.count('"cudaDeviceSynchronize"')
        self.check("as many synchronisations", len(set(counts.values())) == 1, counts)

    def keep(self, name: str, trace: Path) -> None:
        if self.arguments.keep is None:
            return
        size = trace.stat().st_size
        self.check(f"{name}: the trace is below 1 MB", size < MOST_BYTES, f"{size / 2**20:.2f} MiB")
        if size < MOST_BYTES:
            shutil.copy(trace, self.arguments.keep / f"{self.arguments.accelerator}-run-{name}-rank0.json.gz")


def losses(run_dir: Path) -> list[str]:
    return [row["train/loss"] for row in read_rows(run_dir / METRICS) if row.get("train/loss")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--strategies", default="ddp,fsdp,zero3")
    parser.add_argument("--starved", action=argparse.BooleanOptionalAction, default=True)
    words = "metrics.telemetry=true,metrics.telemetry=false"
    parser.add_argument("--telemetry", default=words, help="two words that must wait for the device equally often")
    parser.add_argument("--keep", type=Path, help="a folder for the traces")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checks = Checks(arguments, Path(folder))
        for name in arguments.strategies.split(",") if arguments.strategies else []:
            checks.strategy(name)
        if arguments.starved:
            checks.starved()
        if arguments.telemetry and arguments.accelerator == "cuda":
            checks.synchronizations(*arguments.telemetry.split(","))
    sys.exit(f"{len(checks.failed)} checks failed: {', '.join(checks.failed)}" if checks.failed else 0)


if __name__ == "__main__":
    main()
