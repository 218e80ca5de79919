"""What each word for large models gains and costs on GPUs: tokens a second, peak memory, and the first losses.

    python benchmarks/large_models.py --ranks 1            Llama 1.5 B on one GPU
    python benchmarks/large_models.py --ranks 2            Llama 3 8 B on two GPUs, under fsdp
    python benchmarks/large_models.py --table small        a model of 124 M on one GPU, which the host holds up
    python benchmarks/large_models.py --table images       ResNet-50 on one GPU, one batch of images
    python benchmarks/large_models.py --ranks 1 --only 'fa4|fused'      some of the rows; the others stay as recorded
    python benchmarks/large_models.py --accelerator cpu --tiny          tries it out anywhere

Random tokens in memory, sequences of 8,192, AdamW, fp32 master weights, clipping at 1.0, through the Trainer. Each row
is a run in processes of its own. Writes benchmarks/results/large-models-<gpu>-x<ranks>.json after every row; another
table has its name in place of the ranks.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch.distributed as dist  # noqa: E402
from lightning.pytorch import Callback  # noqa: E402

from benchmarks.harness import results, trainers  # noqa: E402
from benchmarks.harness.clock import StepTimer  # noqa: E402
from benchmarks.harness.data import RANDOM_TOKENS, Held, batch_of_images  # noqa: E402
from benchmarks.harness.device import device_of, free_memory  # noqa: E402
from benchmarks.harness.limits import note, noted, on_ranks  # noqa: E402
from shardwise.distributed.mesh import init_process_group  # noqa: E402
from shardwise.parallel.precision import set_matmul_mode  # noqa: E402
from shardwise.plan import Plan  # noqa: E402
from shardwise.rank import quiet_lightning  # noqa: E402
from shardwise.trainer import build_data, build_module  # noqa: E402

ALWAYS = [
    "optimizer.lr=1e-4", "gradient_clip_val=1.0", "checkpoint=none", "schedule=none", "log_every_n_steps=1000",
    "validate_every_n_steps=1000000",
]  # fmt: skip
# What a row does not name
DEFAULTS = {"precision": "bf16", "compile": "model", "activation_checkpointing": "none"}
OF_TOKENS = {"precision": "bf16", "loss": "full", "attention": "cudnn", "compile": "model",
             "activation_checkpointing": "none"}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """A model, and the rows that are measured of it."""

    ranks: int
    model: list[str]
    rows: list[str]
    defaults: dict[str, str]
    warm_up: int = 4
    timed: int = 8

    @property
    def words(self) -> list[str]:
        return [*self.model, *ALWAYS, f"max_steps={self.warm_up + self.timed}"]


TABLES = {
    "x1": Table(
        1,
        [*RANDOM_TOKENS, "model=llama3_1b", "model.tie_embeddings=false", "strategy=ddp"],
        [
            "micro_batch_size=2 compile=none",
            "micro_batch_size=2 compile=layer",
            "micro_batch_size=2",
            "micro_batch_size=2 compile.mode=max-autotune",
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
        OF_TOKENS,
    ),
    "x2": Table(
        2,
        [*RANDOM_TOKENS, "model=llama3_8b", "strategy=fsdp"],
        [
            "micro_batch_size=1 compile=layer",
            "micro_batch_size=1",
            "micro_batch_size=1 attention=fa4 loss=fused",
            "micro_batch_size=2 compile=layer activation_checkpointing=full",
            "micro_batch_size=2 activation_checkpointing=full",
            "micro_batch_size=2 activation_checkpointing=selective",
            "micro_batch_size=3 attention=fa4 loss=fused activation_checkpointing=selective",
            "micro_batch_size=1 attention=fa4 loss=fused precision=fp8",
        ],
        OF_TOKENS,
    ),
    "small": Table(
        1,
        [*RANDOM_TOKENS, "model=gpt2_124m", "data.sequence_length=256"],
        [
            "micro_batch_size=4 strategy=ddp compile=none",
            "micro_batch_size=4 strategy=ddp compile=layer",
            "micro_batch_size=4 strategy=ddp compile=layer compile.cudagraphs=true",
            "micro_batch_size=4 strategy=ddp",
            "micro_batch_size=4 strategy=ddp compile.cudagraphs=true",
            "micro_batch_size=4 strategy=fsdp compile=none",
            "micro_batch_size=4 strategy=fsdp compile=layer",
            "micro_batch_size=4 strategy=fsdp",
        ],
        OF_TOKENS,
        warm_up=20,
        timed=60,
    ),
    "images": Table(
        1,
        ["recipe=image_classification", "data=synthetic_images", "model=resnet50", "data.num_classes=1000",
         "data.image_size=224", "optimizer=sgd", "strategy=ddp", "module.channels_last=true"],
        ["micro_batch_size=256", "micro_batch_size=256 cudnn_benchmark=true"],
        DEFAULTS,
        warm_up=10,
        timed=30,
    ),
}  # fmt: skip
TINY = [word for word in trainers.TINY_LANGUAGE_MODEL if not word.startswith("micro")]


def plan_of(folder: Path, table: Table, row: str, options: dict[str, Any]) -> Plan:
    given = {word.split("=")[0] for word in row.split()}
    defaults = (f"{word}={value}" for word, value in table.defaults.items() if word not in given)
    tiny = TINY if options["tiny"] else []
    name = re.sub(r"[^a-z0-9]+", "-", f"{row} {time.monotonic_ns()}")
    words = [*table.words, *defaults, *row.split(), *tiny, *options["words"]]
    return trainers.resolve(trainers.on_all(words, table.ranks), options["accelerator"], folder, name)


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


def run_row(folder: Path, table: Table, row: str, options: dict[str, Any]) -> None:
    """In each rank; rank 0 writes the row down."""
    quiet_lightning()
    device = device_of(options["accelerator"])
    plan = plan_of(folder, table, row, options)
    assert plan.data is not None
    init_process_group(plan)
    set_matmul_mode(plan.precision)
    dist.barrier()
    free_memory(device)
    module, timer, losses = build_module(plan), StepTimer(device, table.warm_up, table.timed, 1), Losses()
    of_images = "image_size" in plan.data
    data = Held(batch_of_images(plan, device), plan.micro_batch_size) if of_images else build_data(plan)
    trainers.our_trainer(plan, module, timer, losses).fit(module, datamodule=data)
    found = timer.result()
    samples = plan.micro_batch_size / found["seconds_per_step"]
    raw = json.loads(plan.to_json())
    words = ("chosen_loss", "chosen_attention", "compile", "activation_checkpointing", "precision")
    said = {key.removeprefix("chosen_"): raw[key] for key in words}
    note(folder, found | {
        "samples_per_second_per_gpu": samples,
        "tokens_per_second_per_gpu": samples * plan.data.get("sequence_length", 0),
        "first_step_seconds": losses.first_step_seconds,
        "losses": [round(float(loss), 5) for loss in losses.losses],
        "parameters": sum(p.numel() for p in module.parameters()),
        "plan": said,
    })  # fmt: skip


def measure(table: Table, row: str, options: dict[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            on_ranks(table.ranks, run_row, folder, table, row, options, timeout_seconds=options["timeout"])
            found = noted(folder)[0]
        except (AssertionError, IndexError) as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            found = {"error": (lines or ["did not end"])[-1][:500], "traceback": str(error)[-3000:]}
    return {"row": row, **found, "seconds": round(time.perf_counter() - started, 1)}


def show(row: dict[str, Any]) -> None:
    peak = f", {row['peak_reserved_gib']:.1f} GiB reserved" if "peak_reserved_gib" in row else ""
    speed = row.get("tokens_per_second_per_gpu") or row.get("samples_per_second_per_gpu")
    words = row.get("error") or (
        f"{speed:,.0f} a second and GPU{peak}, first step {row['first_step_seconds']:.0f} s, "
        f"losses {row['losses'][0]:.4f} … {row['losses'][-1]:.4f}"
    )
    print(f"{row['row']}: {words}  ({row['seconds']} s)", flush=True)


def main() -> None:
    parser = results.command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=1, help="1 or 2: the table of this number of GPUs")
    parser.add_argument("--table", choices=TABLES, help="another table; default: that of the ranks")
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
    name = arguments.table or f"x{arguments.ranks}"
    table, path = TABLES[name], arguments.out / f"large-models-{device}-{name}.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    commit = environment.pop("commit")
    result: dict[str, Any] = {
        "command": f"python benchmarks/large_models.py --table {name}",
        "table": name,
        "ranks": table.ranks,
        "environment": environment,
        "settings": {"words": table.words, "defaults": table.defaults, "warm_up": table.warm_up, "timed": table.timed},
        "rows": before,
    }
    for row in arguments.rows or table.rows:
        if not re.search(arguments.only, row):
            continue
        measured = measure(table, row, options) | {"commit": commit}
        result["rows"] = [r for r in result["rows"] if r["row"] != row] + [measured]
        results.write(path, result)
        show(measured)


if __name__ == "__main__":
    main()
