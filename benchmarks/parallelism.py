"""Tensor, pipeline and context parallelism beside FSDP2 on the same GPUs: speed, memory, communication, parity.

    python benchmarks/parallelism.py                     Llama 1.5 B and 8 B on two GPUs
    python benchmarks/parallelism.py --only 'llama3_1b'  some of the rows; the others stay as recorded
    python benchmarks/parallelism.py --accelerator cpu --tiny          tries it out anywhere

Each layout trains on the same global batches of random tokens: sequences of 8,192, AdamW, fp32 master weights, clipping
at 1.0, through the Trainer. `parity` runs a small model in fp32 under each layout; its losses must be those of fsdp to
1e-4. Each row is a run in processes of its own. Writes benchmarks/results/parallelism-<gpu>-x<ranks>.json after each.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.commands import train  # noqa: E402
from benchmarks.harness.data import NO_CORPUS  # noqa: E402
from benchmarks.harness.state_memory import state_of  # noqa: E402
from benchmarks.harness.trainers import TINY_LANGUAGE_MODEL  # noqa: E402
from shardwise.plan.plan import Plan  # noqa: E402
from shardwise.run_dir.files import METRICS, PLAN, SUMMARY, profile_folder, read_rows  # noqa: E402

PROFILED, STEPS = 12, 16
ALWAYS = [
    "data._target_=benchmarks.harness.data.RandomTokens", *NO_CORPUS, "+data.vocab_size=${model.vocab_size}",
    "module.sample_tokens=0", "optimizer.lr=1e-4", "gradient_clip_val=1.0", "checkpoint=none", "schedule=none",
    "log_every_n_steps=1", "validate_every_n_steps=1000000", "strategy=fsdp",
    "callbacks.state._target_=benchmarks.harness.state_memory.StateMemory",
]  # fmt: skip
LAYOUTS = {
    "FSDP": [],
    "tensor": ["strategy.tensor_parallel_size={n}"],
    "pipeline": ["strategy.pipeline_parallel_size={n}"],
    "context": ["strategy.context_parallel_size={n}"],
}
BESIDE = ["strategy.symmetric_memory=null", "compile=layer"]  # null, so that it runs on a CPU, too
MODELS = {
    "llama3_1b": ["model=llama3_1b", "model.tie_embeddings=false", "compile=layer"],
    "llama3_8b": ["model=llama3_8b", "compile=layer", "activation_checkpointing=full"],
}
TIMED = ["data.sequence_length=8192", "precision=bf16", "micro_batch_size=1", "global_batch_size=8",
         f"max_steps={STEPS}", f"profile.start={PROFILED}", "profile.ranks=all"]  # fmt: skip
PARITY = ["model=llama3_1b", "model.n_layers=4", "model.vocab_size=8192", "data.sequence_length=512", "precision=fp32",
          "micro_batch_size=1", "global_batch_size=8", "max_steps=6"]  # fmt: skip
BOUND = 1e-4


def rows_of(ranks: int) -> dict[str, list[str]]:
    """A row's name → its overrides."""
    rows = {f"parity {layout}": [*PARITY, *words] for layout, words in LAYOUTS.items()}
    rows["parity tensor, beside products"] = [*PARITY, *LAYOUTS["tensor"], *BESIDE]
    for model, own in MODELS.items():
        rows |= {f"{model} {layout}": [*own, *TIMED, *words] for layout, words in LAYOUTS.items()}
    return {name: [word.format(n=ranks) if "{n}" in word else word for word in words] for name, words in rows.items()}


def measure(name: str, words: list[str], options: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tiny = [*TINY_LANGUAGE_MODEL, "model.n_heads=4", "model.n_kv_heads=4"] if options["tiny"] else []
        line = [*ALWAYS, *words, *tiny, f"devices={options['ranks']}", f"accelerator={options['accelerator']}",
                f"runs_dir={folder}", "name=row"]  # fmt: skip
        code = train(line, folder / "log", options["timeout"])
        found: dict[str, Any] = {"words": words}
        if code:
            found["error"] = f"exit code {code}\n{(folder / 'log').read_text()[-3000:]}"
        else:
            found |= read(folder / "row")
    return found | {"seconds": round(time.perf_counter() - began, 1)}


def read(run: Path) -> dict[str, Any]:
    """What a run has written of its speed, memory, losses and profile."""
    summary = json.loads((run / SUMMARY).read_text())
    losses = [float(row["train/loss"]) for row in read_rows(run / METRICS) if row.get("train/loss")]
    plan = Plan.from_json((run / PLAN).read_text())
    found = {"summary": summary, "losses": losses, "topology": asdict(plan.topology), "state": state_of(run, plan)}
    profile = profile_folder(run, PROFILED) / SUMMARY
    return found | ({"profile": json.loads(profile.read_text())["step"]} if profile.exists() else {})


def check_parity(rows: dict[str, Any]) -> bool:
    """Whether the losses of all layouts are those of fsdp."""
    wanted = rows.get("parity FSDP", {}).get("losses", [])
    holds = True
    for name, row in rows.items():
        if name.startswith("parity") and wanted and "losses" in row:
            worst = max(abs(a - b) / abs(b) for a, b in zip(row["losses"], wanted, strict=True))
            row["deviation"] = worst
            holds &= worst <= BOUND
    return holds


def show(name: str, row: dict[str, Any]) -> None:
    if "error" in row:
        print(f"{name}: {row['error'][-1500:]}", flush=True)
        return
    said, step = row["summary"], row.get("profile", {})
    speed = f"losses {row['losses'][0]:.5f} … {row['losses'][-1]:.5f}"
    if step:
        peak = f", {said['peak_memory_gib']} GiB reserved" if said["peak_memory_gib"] else ""
        topology = row["topology"]
        speed = f"{said['tokens_per_second'] / topology['nodes'] / topology['devices']:,.0f} tokens/s/GPU{peak}"
    if row["state"]:
        parts = zip(row["state"]["allocated"], row["state"]["stated"], strict=True)
        speed += ", state " + ", ".join(f"{here / 1e9:.2f} of {stated / 1e9:.2f} GB stated" for here, stated in parts)
    exposed = f", {step['exposed_communication_ms']:.1f} of {step['span_ms']:.1f} ms exposed" if step else ""
    print(f"{name}: {speed}{exposed}  ({row['seconds']} s)", flush=True)


def main() -> int:
    parser = results.command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a small model, for trying it out")
    parser.add_argument("--timeout", type=float, default=150, help="seconds for one row")
    parser.add_argument("--only", default="", help="a regular expression: rows to measure, the others stay as recorded")
    arguments = parser.parse_args()
    environment, device = results.measured_on(arguments.accelerator, arguments.commit)
    path = arguments.out / f"parallelism-{device}-x{arguments.ranks}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    commit = environment.pop("commit")
    for name, words in rows_of(arguments.ranks).items():
        if re.search(arguments.only, name):
            rows[name] = measure(name, words, vars(arguments)) | {"commit": commit}
            show(name, rows[name])
            holds = check_parity(rows)
            results.write(path, {"command": f"python benchmarks/parallelism.py --ranks {arguments.ranks}", "rows": rows,
                                 "ranks": arguments.ranks, "environment": environment, "always": ALWAYS})  # fmt: skip
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
