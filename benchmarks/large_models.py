"""What each word for large models gains and costs on GPUs: tokens a second, peak memory, and the first losses.

    python benchmarks/large_models.py --ranks 1            Llama 1.5 B on one GPU
    python benchmarks/large_models.py --ranks 2            Llama 3 8 B on two GPUs, under fsdp
    python benchmarks/large_models.py --ranks 1 --only 'fa4|fused'      some of the rows; the others stay as recorded
    python benchmarks/large_models.py --accelerator cpu --tiny          tries it out anywhere

Random tokens in memory, sequences of 8,192, AdamW, fp32 master weights, clipping at 1.0, through the Trainer. Each row
is a run in processes of its own. Writes benchmarks/results/large-models-<gpu>-x<ranks>.json after every row.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch.distributed as dist  # noqa: E402
from lightning.pytorch import Callback  # noqa: E402

from benchmarks.harness import results, trainers  # noqa: E402
from benchmarks.harness.clock import StepTimer  # noqa: E402
from benchmarks.harness.data import RANDOM_TOKENS  # noqa: E402
from benchmarks.harness.device import device_of, free_memory  # noqa: E402
from benchmarks.harness.limits import note, noted, on_ranks  # noqa: E402
from shardwise.distributed.process_group import init_process_group  # noqa: E402
from shardwise.parallel.precision import set_matmul_mode  # noqa: E402
from shardwise.plan import Plan  # noqa: E402
from shardwise.rank import quiet_lightning  # noqa: E402
from shardwise.trainer import build_data, build_module  # noqa: E402

WARM_UP, TIMED = 4, 8
ALWAYS = [
    *RANDOM_TOKENS, "optimizer.lr=1e-4", "gradient_clip_val=1.0", "log_every_n_steps=1000",
    f"max_steps={WARM_UP + TIMED}",
]  # fmt: skip
MODELS = {
    1: ["model=llama3_1b", "model.tie_embeddings=false", "strategy=ddp"],
    2: ["model=llama3_8b", "strategy=fsdp"],
}
# What a row does not name
DEFAULTS = {
    "precision": "bf16", "loss": "full", "attention": "cudnn", "compile": "model", "activation_checkpointing": "none",
}  # fmt: skip
ROWS = {
    1: [
        "micro_batch_size=2 compile=none",
        "micro_batch_size=2 compile=layer",
        "micro_batch_size=2",
        "micro_batch_size=2 loss=chunked",
        "micro_batch_size=2 loss=fused",
        "micro_batch_size=2 attention=flash",
        "micro_batch_size=2 attention=fa4",
        "micro_batch_size=2 activation_checkpointing=selective",
        "micro_batch_size=2 activation_checkpointing=full",
        "micro_batch_size=2 activation_checkpointing=full activation_checkpointing.every_n_layers=2",
        "micro_batch_size=2 compile.memory_budget=0.5",
        "micro_batch_size=2 precision=fp8",
        "micro_batch_size=2 precision=fp8 precision.fp8.recipe=rowwise",
        "micro_batch_size=4",
        "micro_batch_size=4 attention=fa4",
        "micro_batch_size=4 attention=fa4 loss=fused",
        "micro_batch_size=6 attention=fa4 loss=fused",
        "micro_batch_size=8 attention=fa4 loss=fused activation_checkpointing=selective",
        "micro_batch_size=4 attention=fa4 loss=fused precision=fp8",
    ],
    2: [
        "micro_batch_size=1 compile=layer",
        "micro_batch_size=1",
        "micro_batch_size=1 attention=fa4 loss=fused",
        "micro_batch_size=2 compile=layer activation_checkpointing=full",
        "micro_batch_size=2 activation_checkpointing=full",
        "micro_batch_size=2 activation_checkpointing=selective",
        "micro_batch_size=3 attention=fa4 loss=fused activation_checkpointing=selective",
        "micro_batch_size=1 attention=fa4 loss=fused precision=fp8",
    ],
}
TINY = [word for word in trainers.TINY_LANGUAGE_MODEL if not word.startswith("micro")]


def plan_of(folder: Path, ranks: int, row: str, options: dict[str, Any]) -> Plan:
    given = {word.split("=")[0] for word in row.split()}
    words = [
        *MODELS[min(ranks, 2)],
        *ALWAYS,
        *(f"{word}={value}" for word, value in DEFAULTS.items() if word not in given),
    ]
    words += [*row.split(), *(TINY if options["tiny"] else []), *options["words"]]
    name = re.sub(r"[^a-z0-9]+", "-", f"{row} {time.monotonic_ns()}")
    return trainers.resolve(trainers.on_all(words, ranks), options["accelerator"], folder, name)


class Losses(Callback):
    """The loss of each step, kept on the device, and the time of the first step."""

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.begin = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach())
        if batch_idx == 0:
            float(self.losses[0])
            self.first_step_seconds = time.perf_counter() - self.begin


def run_row(folder: Path, ranks: int, row: str, options: dict[str, Any]) -> None:
    """In each rank; rank 0 writes the row down."""
    quiet_lightning()
    device = device_of(options["accelerator"])
    plan = plan_of(folder, ranks, row, options)
    init_process_group(plan)
    set_matmul_mode(plan.precision)
    dist.barrier()
    free_memory(device)
    module, timer, losses = build_module(plan), StepTimer(device, WARM_UP, TIMED, 1), Losses()
    trainers.our_trainer(plan, module, timer, losses).fit(module, datamodule=build_data(plan))
    found = timer.result()
    tokens = plan.micro_batch_size * plan.data["sequence_length"] if plan.data else 0
    said = {key: value for key, value in json.loads(plan.to_json()).items()
            if key in ("loss", "attention", "compile", "activation_checkpointing", "precision")}  # fmt: skip
    note(folder, found | {
        "tokens_per_second_per_gpu": tokens / found["seconds_per_step"],
        "first_step_seconds": losses.first_step_seconds,
        "losses": [round(float(loss), 5) for loss in losses.losses],
        "parameters": sum(p.numel() for p in module.parameters()),
        "plan": said,
    })  # fmt: skip


def measure(ranks: int, row: str, options: dict[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            on_ranks(ranks, run_row, folder, ranks, row, options, timeout_seconds=options["timeout"])
            found = noted(folder)[0]
        except (AssertionError, IndexError) as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            found = {"error": (lines or ["did not end"])[-1][:500], "traceback": str(error)[-3000:]}
    return {"row": row, **found, "seconds": round(time.perf_counter() - started, 1)}


def show(row: dict[str, Any]) -> None:
    peak = f", {row['peak_reserved_gib']:.1f} GiB reserved" if "peak_reserved_gib" in row else ""
    words = row.get("error") or (
        f"{row['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU{peak}, first step {row['first_step_seconds']:.0f} s, "
        f"losses {row['losses'][0]:.4f} … {row['losses'][-1]:.4f}"
    )
    print(f"{row['row']}: {words}  ({row['seconds']} s)", flush=True)


def main() -> None:
    parser = results.command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="a small model, for trying it out")
    parser.add_argument("--timeout", type=float, default=150, help="seconds for one row")
    parser.add_argument("--only", default="", help="a regular expression: rows to measure, the others stay as recorded")
    parser.add_argument("--rows", action="append", help="another row, as words; may be given several times")
    parser.add_argument("words", nargs="*", help="overrides for every row")
    arguments = parser.parse_args()
    environment, device = results.measured_on(arguments.accelerator, arguments.commit)
    options = {
        key: value for key, value in vars(arguments).items() if key in ("tiny", "timeout", "words", "accelerator")
    }
    path = arguments.out / f"large-models-{device}-x{arguments.ranks}.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    commit = environment.pop("commit")
    result: dict[str, Any] = {
        "command": f"python benchmarks/large_models.py --ranks {arguments.ranks}",
        "ranks": arguments.ranks,
        "environment": environment,
        "settings": {"words": [*MODELS[min(arguments.ranks, 2)], *ALWAYS], "defaults": DEFAULTS, "warm_up": WARM_UP,
                     "timed": TIMED},
        "rows": before,
    }  # fmt: skip
    for row in arguments.rows or ROWS[min(arguments.ranks, 2)]:
        if not re.search(arguments.only, row):
            continue
        measured = measure(arguments.ranks, row, options) | {"commit": commit}
        result["rows"] = [r for r in result["rows"] if r["row"] != row] + [measured]
        results.write(path, result)
        show(measured)


if __name__ == "__main__":
    main()
