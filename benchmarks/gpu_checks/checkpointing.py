"""What only a GPU shows of `compile=` and `activation_checkpointing=`: the same numbers, memory, speed, CUDA graphs.

    python benchmarks/gpu_checks/checkpointing.py                     on one GPU: about a minute and a half

Prints a line for each cell and each check, and exits with 1 if a check fails. Writes
benchmarks/results/checkpointing-gpu-checks.json after every cell; other sections of an earlier run stay in it.
`--accelerator cpu --tiny` tries it out anywhere, where CUDA graphs are left out.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
for variable, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost"}.items():
    os.environ.setdefault(variable, str(value))
os.environ.setdefault("MASTER_PORT", "29511")

import torch  # noqa: E402
from lightning.pytorch import Callback  # noqa: E402

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.clock import StepTimer  # noqa: E402
from benchmarks.harness.data import Held, batch_of_tokens, pinned  # noqa: E402
from benchmarks.harness.device import device_of, free_memory  # noqa: E402
from benchmarks.harness.trainers import our_trainer, resolve  # noqa: E402
from shardwise.distributed.mesh import init_process_group  # noqa: E402
from shardwise.parallel.precision import set_matmul_mode  # noqa: E402
from shardwise.rank import quiet_lightning  # noqa: E402
from shardwise.trainer import build_module  # noqa: E402

COMMAND = "python benchmarks/gpu_checks/checkpointing.py"
Row = dict[str, Any]
BASE = [
    "devices=1", "precision=bf16", "optimizer=adamw", "optimizer.lr=1e-4", "schedule=none", "checkpoint=none",
    "module.sample_tokens=0", "validate_every_n_steps=1000000", "log_every_n_steps=1000000", "seed=1",
]  # fmt: skip
# Two layers as wide as those of 1.5e9 parameters, and a small vocabulary, so that layers are most of the step
FEW = ["model=llama3_1b", "model.n_layers=2", "model.vocab_size=8192", "data.sequence_length=4096",
       "micro_batch_size=2"]  # fmt: skip
SMALL = ["model=gpt2_124m", "data.sequence_length=256", "micro_batch_size=4"]
TINY = ["model.dim=64", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=2", "model.ffn_dim=96",
        "model.vocab_size=64", "model.max_seq_len=32", "model.rope_scaling=null",
        "data.sequence_length=32"]  # fmt: skip
NONE, FULL, SELECTIVE = (f"activation_checkpointing={name}" for name in ("none", "full", "selective"))
SECOND = f"{SELECTIVE} activation_checkpointing.save=[every_second_matmul,attention]"
CHECKPOINTING = {"none": NONE, "selective": SELECTIVE, "selective, every second product": SECOND, "full": FULL}


class Losses(Callback):
    """The loss of every micro-batch, and the memory that is allocated when its forward pass has ended."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.kept = 0.0

    def on_before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
        self.losses.append(loss.detach().clone())
        if loss.is_cuda:
            self.kept = torch.cuda.memory_allocated() / 2**30


class Cells:
    """Runs of the Trainer in this process, one after the other."""

    def __init__(self, accelerator: str, tiny: bool, folder: Path) -> None:
        self.accelerator, self.tiny, self.folder = accelerator, tiny, folder
        self.device, self.number = device_of(accelerator), 0

    def run(self, words: list[str], *, warm_up: int = 3, timed: int = 5, accumulate: int = 1) -> Row:
        """Tokens a second, peak memory, GiB when the forward pass has ended, and losses."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        free_memory(self.device)
        self.number += 1
        steps = warm_up + timed
        size = next(int(word.partition("=")[2]) for word in words if word.startswith("micro_batch_size="))
        words = [*BASE, *words, *(TINY if self.tiny else []), f"global_batch_size={size * accumulate}"]
        plan = resolve([*words, f"max_steps={steps}"], self.accelerator, self.folder, f"cell{self.number}")
        quiet_lightning()
        set_matmul_mode(plan.precision)
        if not torch.distributed.is_initialized():
            init_process_group(plan)
        timer, losses = StepTimer(self.device, warm_up, timed, accumulate), Losses()
        with contextlib.redirect_stdout(io.StringIO()):
            module = build_module(plan)
            trainer = our_trainer(plan, module, timer, losses)
            trainer.fit(module, datamodule=Held(pinned(batch_of_tokens(plan), self.device), size))
        row = timer.result()
        assert plan.data is not None
        tokens = plan.global_batch_size * plan.data["sequence_length"]
        return row | {
            "tokens_per_second": tokens / row["seconds_per_step"], "kept_gib": losses.kept,
            "graphs": torch._dynamo.utils.counters["stats"].get("unique_graphs", 0),
            "losses": [float(loss) for loss in losses.losses],
        }  # fmt: skip


def outside() -> AbstractContextManager[Any]:
    """Checkpointing around a compiled layer, as it was before: for comparison."""
    return patch("shardwise.parallel.parallelize.one_graph_or", lambda whole, pieces, options: pieces())


def is_close(row: Row, plain: Row, bound: float) -> bool:
    return all(abs(a - b) <= bound * abs(b) for a, b in zip(row["losses"], plain["losses"], strict=True))


def check_orders(cells: Cells) -> Iterator[tuple[str, bool, Row]]:
    """The same losses as without; checkpointing keeps less, and inside the compiled layer it is no slower."""
    plain = cells.run(FEW)
    yield "eager, none", True, plain
    for name in ("selective", "full"):
        row = cells.run([*FEW, *CHECKPOINTING[name].split()])
        # cuDNN's attention adds up gradients in any order, so that two equal runs differ in their last bits.
        yield f"eager, {name}", is_close(row, plain, 1e-3) and row["kept_gib"] <= plain["kept_gib"], row
    by_layer = cells.run([*FEW, "compile=layer"])
    yield "layer, none", is_close(by_layer, plain, 1e-2), by_layer
    for name in ("selective, every second product", "full"):
        row = cells.run([*FEW, "compile=layer", *CHECKPOINTING[name].split()])
        yield f"layer, {name}", is_close(row, plain, 1e-2) and row["kept_gib"] <= by_layer["kept_gib"], row
    with outside():
        before = cells.run([*FEW, "compile=layer", FULL])
    is_faster = row["tokens_per_second"] >= 0.98 * before["tokens_per_second"]
    yield "layer, full outside the graph", is_faster or cells.accelerator == "cpu", before
    for name in ("none", "full"):
        row = cells.run([*FEW, "compile=model", *CHECKPOINTING[name].split()])
        yield f"model, {name}", is_close(row, plain, 1e-2), row


def check_graphs(cells: Cells) -> Iterator[tuple[str, bool, Row]]:
    """CUDA graphs change no loss, with accumulation, too."""
    if cells.accelerator == "cpu":
        return
    for scope in ("layer", "model"):
        words = [*SMALL, "model.n_layers=2", f"compile={scope}"]
        plain = cells.run(words, accumulate=2)
        row = cells.run([*words, "compile.cudagraphs=true"], accumulate=2)
        yield f"{scope}, CUDA graphs", is_close(row, plain, 1e-3), row


SECTIONS = {"orders": check_orders, "graphs": check_graphs}


def said(row: Row) -> str:
    peak = f", peak {row['peak_reserved_gib']:.1f} GiB reserved" if "peak_reserved_gib" in row else ""
    return f"{row['tokens_per_second']:,.0f} tokens/s{peak}, {row['kept_gib']:.2f} GiB after the forward pass"


def main() -> int:
    parser = results.command_line(__doc__)
    parser.add_argument("--sections", default="orders,graphs", help=",".join(SECTIONS))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    environment, _ = results.measured_on(options.accelerator, options.commit)
    path = options.out / "checkpointing-gpu-checks.json"
    content: dict[str, Any] = {"environment": environment, "sections": {}}
    with contextlib.suppress(OSError, ValueError, KeyError):
        content["sections"] = json.loads(path.read_text())["sections"]
    good = True
    with tempfile.TemporaryDirectory() as folder:
        cells = Cells(options.accelerator, options.tiny, Path(folder))
        for section in options.sections.split(","):
            rows: list[Row] = []
            content["sections"][section] = {"command": f"{COMMAND} --sections {section}", "rows": rows}
            try:
                for name, is_right, row in SECTIONS[section](cells):
                    rows.append({"cell": name, "ok": is_right, **row})
                    print(f"{'ok' if is_right else 'FAILED':7}{section}: {name}: {said(row)}", flush=True)
                    results.write(path, content)
            except Exception as error:  # the other sections still say what they find
                rows.append({"cell": "", "ok": False, "error": f"{type(error).__name__}: {error}"[:500]})
                print(f"FAILED {section}: {rows[-1]['error']}", flush=True)
                results.write(path, content)
            good = good and all(row["ok"] for row in rows)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
