"""What only GPUs show of the engines' knobs: the same losses over NCCL and side streams, and what speed and memory do.

    python benchmarks/gpu_checks/knobs.py                all GPUs, at most four: a minute and a half
    python benchmarks/gpu_checks/knobs.py --ranks 2 --only symmetric     some of them
    python benchmarks/gpu_checks/knobs.py --accelerator cpu --ranks 4 --tiny     tries it out

Each strategy runs as it is, and with its knobs turned, with `deterministic=true`. Losses and gradient norms must be the
same: the same bits under fsdp, where only the time of a gather changes, if the same run gives the same bits again; to
rounding under zero1 to 3, where gradients are summed in other pieces. The first norm must be that of fsdp, too. Writes
benchmarks/results/knobs-gpu-checks.json, prints a line for each run, and exits with 1 if a check fails. Without
DeepSpeed the zero strategies are left out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
from lightning.pytorch import Callback  # noqa: E402

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.clock import StepTimer  # noqa: E402
from benchmarks.harness.data import Held, batch_of_tokens  # noqa: E402
from benchmarks.harness.device import device_of, free_memory  # noqa: E402
from benchmarks.harness.limits import note, rows_of_ranks  # noqa: E402
from benchmarks.harness.trainers import on_all, our_trainer, resolve  # noqa: E402
from shardwise.distributed.mesh import init_process_group  # noqa: E402
from shardwise.rank import quiet_lightning  # noqa: E402
from shardwise.trainer import build_module  # noqa: E402

WARM_UP, TIMED = 3, 6
MODEL = ["model=llama3_1b", "model.n_layers=8", "model.vocab_size=65536", "model.tie_embeddings=false",
         "data.sequence_length=2048", "micro_batch_size=2"]  # fmt: skip
TINY = ["model.dim=64", "model.n_layers=4", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=96",
        "model.vocab_size=64", "data.sequence_length=16"]  # fmt: skip
ALWAYS = ["precision=bf16", "deterministic=true", "optimizer.lr=1e-4", "schedule=none", "checkpoint=none",
          "module.sample_tokens=0", "validate_every_n_steps=1000000",
          "log_every_n_steps=1000000", f"max_steps={WARM_UP + TIMED}"]  # fmt: skip
CELLS = {  # strategy → the knobs of each run; the first is the strategy as it is
    "fsdp": [
        "",
        "again",
        "forward_prefetch_units=1 backward_prefetch_units=1",
        "forward_prefetch_units=3 backward_prefetch_units=3",
        "reshard_after_forward=false",
        "reshard_after_forward=2",
        "symmetric_memory=true",
        "symmetric_memory=true reshard_after_forward=false",
        "symmetric_memory=true forward_prefetch_units=3 backward_prefetch_units=3",
    ],
    "zero1": ["", "allgather_bucket_elements=1000000"],
    "zero2": ["", "overlap_comm=false", "reduce_bucket_elements=1000000 allgather_bucket_elements=1000000"],
    "zero3": [
        "",
        "overlap_comm=false prefetch_bucket_elements=0 max_reuse_distance_elements=0",
        "reduce_bucket_elements=1000000 max_live_elements=0 sub_group_elements=10000000",
        "persistence_threshold_elements=0 prefetch_bucket_elements=500000000",
        "persistence_threshold_elements=1000000000",
    ],
}  # fmt: skip
BOUND = 2e-3  # of a loss in bf16 whose gradients are summed in other pieces
NORM_BOUND = 5e-3  # of the first gradient norm: the weights are the same still


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.norms: list[torch.Tensor] = []

    def on_before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
        self.losses.append(loss.detach().clone())

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step > len(self.norms):
            self.norms.append(trainer.precision_plugin.gradient_norm.detach().clone())


def cells_for(ranks: int, accelerator: str, only: str) -> list[tuple[str, str]]:
    """Strategy and knobs of each run. Groups of two ranks need four, and symmetric memory several GPUs."""
    there = importlib.util.find_spec("deepspeed") is not None
    found = [
        (strategy, knobs)
        for strategy, runs in CELLS.items()
        for knobs in runs
        if there or strategy == "fsdp"
        if "=2" not in knobs or ranks % 2 == 0 < ranks - 2
        if "symmetric" not in knobs or (accelerator == "cuda" and ranks > 1)
    ]
    named = {f"{strategy} {knobs}": (strategy, knobs) for strategy, knobs in found}
    wanted = results.chosen(only, named)
    return [cell for name, cell in named.items() if name in wanted or cell[1] in ("", "again")]


def run_all(folder: Path, ranks: int, accelerator: str, tiny: bool, only: str) -> None:
    """In each rank. Rank 0 writes a row for each run."""
    device = device_of(accelerator)
    quiet_lightning()
    for number, (strategy, knobs) in enumerate(cells_for(ranks, accelerator, only)):
        words = [
            f"strategy={strategy}",
            *(f"strategy.{word}" for word in knobs.split() if word != "again"),
            *ALWAYS,
            *MODEL,
        ]
        plan = resolve(on_all([*words, *(TINY if tiny else [])], ranks, 2), accelerator, folder, f"cell{number}")
        if not torch.distributed.is_initialized():
            init_process_group(plan)
        free_memory(device)
        timer, losses = StepTimer(device, WARM_UP, TIMED, 2), Losses()
        with contextlib.redirect_stdout(io.StringIO()):
            module = build_module(plan)
            our_trainer(plan, module, timer, losses).fit(module, datamodule=Held(batch_of_tokens(plan), 2))
        note(folder, {"strategy": strategy, "knobs": knobs, **timer.result(),
                      "losses": [float(loss) for loss in losses.losses],
                      "norms": [float(norm) for norm in losses.norms]})  # fmt: skip
        del module, timer


def off(row: dict[str, Any], usual: dict[str, Any]) -> float:
    """The largest relative deviation of a loss."""
    return max(abs(a / b - 1) for a, b in zip(row["losses"], usual["losses"], strict=True))


def main() -> None:
    parser = results.command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=max(1, min(4, torch.cuda.device_count())))
    parser.add_argument("--tiny", action="store_true", help="a small model, for trying it out")
    parser.add_argument("--only", default="", help="a regular expression: runs besides those without knobs")
    parser.add_argument("--timeout", type=float, default=150, help="seconds for all runs together")
    arguments = parser.parse_args()
    environment, _ = results.measured_on(arguments.accelerator, arguments.commit)
    wanted = cells_for(arguments.ranks, arguments.accelerator, arguments.only)
    options = (arguments.ranks, arguments.accelerator, arguments.tiny, arguments.only)
    rows, error = rows_of_ranks(arguments.ranks, run_all, *options, timeout_seconds=arguments.timeout)
    usual = {row["strategy"]: row for row in rows if not row["knobs"]}
    again = [off(row, usual["fsdp"]) for row in rows if row["knobs"] == "again"]
    for row in rows:
        row["off"] = off(row, usual[row["strategy"]])
        row["norm_off"] = abs(row["norms"][0] / usual["fsdp"]["norms"][0] - 1)
        row["ok"] = row["off"] <= (0.0 if row["strategy"] == "fsdp" and again == [0.0] else BOUND)
        row["ok"] &= row["norm_off"] <= NORM_BOUND
        peaks = ", ".join(f"{key} {value:.2f}" for key, value in row.items() if key.startswith("peak"))
        print(f"{'ok  ' if row['ok'] else 'FAIL'} {row['strategy']} {row['knobs'] or 'as it is'}: "
              f"{1e3 * row['seconds_per_step']:.1f} ms a step, {peaks}, losses off by {row['off']:.1e}, "
              f"first gradient norm {row['norms'][0]:.4g}, off by {row['norm_off']:.1e}")  # fmt: skip
    done = {(row["strategy"], row["knobs"]) for row in rows}
    missing = [cell for cell in wanted if cell not in done]
    for strategy, knobs in missing:
        print(f"FAIL {strategy} {knobs or 'as it is'}: did not end\n{error}")
    result = {"command": results.command(), "ranks": arguments.ranks, "environment": environment, "rows": rows,
              "error": error}  # fmt: skip
    results.write(arguments.out / "knobs-gpu-checks.json", result)
    sys.exit(1 if missing or not all(row["ok"] for row in rows) else 0)


if __name__ == "__main__":
    main()
