"""Every strategy against a plain one-process loop, beside stock Lightning: the data of docs/parity.md.

    make parity        CPU, gloo: 1, 2 and 4 ranks
    make parity-gpu    NCCL: as many of 2, 4 and 8 GPUs as there are (ARGS="--ranks 2": two)

Writes benchmarks/results/matrix-<device>-x<ranks>.json as it goes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch import strategies as lightning_strategies  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from benchmarks.machine import measured_on  # noqa: E402
from shardwise.distributed.process_group import init_process_group  # noqa: E402
from shardwise.rank import quiet_lightning  # noqa: E402
from tests.harness.everything import BATCH, Network, rows  # noqa: E402
from tests.harness.parity import (  # noqa: E402
    BOUNDS,
    CLIP,
    STEPS,
    Cell,
    all_cells,
    deviations,
    plan_of,
    reference,
    run_cells,
)  # fmt: skip
from tests.harness.processes import spawn  # noqa: E402
from tests.harness.reference import OPTIMIZERS, WEIGHT_DECAY, groups_of, update_deviation  # noqa: E402

PART = 30  # cells that share a group of processes: what hangs or dies costs the others little
# Where clipping bites, it hides a gradient that was divided twice.
STOCK_CELLS = [Cell("ddp", "fp32", optimizer, accumulate, clip, False)
               for optimizer in OPTIMIZERS for accumulate, clip in ((1, CLIP), (4, CLIP), (4, None))]  # fmt: skip
STOCK = ["DDPStrategy", "ModelParallelStrategy", "FSDPStrategy", "DeepSpeedStrategy, stage 1",
         "DeepSpeedStrategy, stage 2", "DeepSpeedStrategy, stage 3"]  # fmt: skip


class Stock(LightningModule):
    """The network as a user of stock Lightning has it: the mean loss of each micro-batch."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer, self.network = optimizer, Network(False)

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is not None and not hasattr(self.network, "unshard"):
            from torch.distributed.fsdp import fully_shard

            for layer in (*self.network.blocks, self.network):
                fully_shard(layer, mesh=mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        total, count = self.network(batch)
        return total / count

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](groups_of(self.network))

    def on_train_end(self) -> None:
        self.final = {name: whole(p).double().cpu() for name, p in self.network.named_parameters()}


def whole(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A parameter's values, of all ranks. Collective."""
    value = parameter.detach()
    if hasattr(parameter, "ds_id"):
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter]):
            return parameter.detach().clone()
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()  # type: ignore[no-any-return]


def stock_strategy(name: str, accelerator: str) -> Any:
    kind, _, stage = name.partition(", stage ")
    if kind == "FSDPStrategy":
        from tests.harness.everything import Block

        return lightning_strategies.FSDPStrategy(auto_wrap_policy={Block}, use_orig_params=True)
    if kind == "ModelParallelStrategy":
        return lightning_strategies.ModelParallelStrategy(
            data_parallel_size=dist.get_world_size(), tensor_parallel_size=1
        )
    if kind == "DDPStrategy":
        return lightning_strategies.DDPStrategy()
    return (OnCpu if accelerator == "cpu" else lightning_strategies.DeepSpeedStrategy)(
        stage=int(stage),
        logging_batch_size_per_gpu=1,
        **({"process_group_backend": "gloo"} if accelerator == "cpu" else {}),
    )


class OnCpu(lightning_strategies.DeepSpeedStrategy):
    """DeepSpeed's strategy without what asks for a GPU; what it computes is its own."""

    def setup_environment(self) -> None:
        lightning_strategies.DDPStrategy.setup_environment(self)  # type: ignore[arg-type]

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)  # the engine asks for its number

    def _init_deepspeed_distributed(self) -> None:
        import deepspeed

        deepspeed.init_distributed("gloo", dist_init_required=False)


def run_stock(folder: Path, ranks: int, names: list[str], accelerator: str) -> None:
    """In each rank: Lightning's own strategies, on the same rows; rank 0 writes each result down when it is there."""
    quiet_lightning()
    for name in names:
        for number, cell in enumerate(STOCK_CELLS):
            plan = plan_of(cell, ranks, folder / f"{number}", accelerator)
            if not dist.is_initialized():
                init_process_group(plan)
            row = {"strategy": name, "optimizer": cell.optimizer, "accumulate": cell.accumulate, "clip": cell.clip}
            try:
                module = Stock(cell.optimizer)
                size, rank = plan.micro_batch_size, dist.get_rank()
                batches = [list(range(i, i + size)) for i in range(rank * size, 48, ranks * size)]
                trainer = Trainer(
                    accelerator="gpu" if accelerator == "cuda" else "cpu", devices=ranks, max_steps=STEPS,
                    strategy=stock_strategy(name, accelerator), accumulate_grad_batches=cell.accumulate,
                    gradient_clip_val=cell.clip, use_distributed_sampler=False, logger=False, barebones=False,
                    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                    default_root_dir=folder,
                )  # fmt: skip
                trainer.fit(module, DataLoader(rows(), batch_sampler=batches))  # type: ignore[arg-type]
                start, final, *_ = reference("fp32", cell.optimizer, cell.clip, False)
                trained = [n for n in start if not torch.equal(start[n], final[n])]
                ours = {n: module.final[n.removeprefix("network.")] for n in trained}
                row["update"] = max(update_deviation({n: start[n] for n in trained}, ours, final).values())
            except Exception as error:
                traceback.print_exc()
                row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            if dist.get_rank() == 0:
                with (folder / "stock.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")


def measured(ranks: int, accelerator: str, only: str, timeout: float) -> Any:
    """Rows of the matrix, a part at a time."""
    cells = [cell for cell in all_cells(ranks) if re.search(only, str(cell))]
    for first in range(0, len(cells), PART):
        part = cells[first : first + PART]
        with tempfile.TemporaryDirectory() as name:
            try:
                results = spawn(ranks, run_cells, Path(name), ranks, part, accelerator, timeout_seconds=timeout)[0]
            except AssertionError as error:
                print(str(error)[-3000:], flush=True)
                yield [{**vars(cell), "error": str(error)[-500:]} for cell in part]
                continue
            yield [row_of(cell, ranks, result, plan_of(cell, ranks, Path(name) / "plan", accelerator))
                   for cell, result in results.items()]  # fmt: skip


def row_of(cell: Cell, ranks: int, result: dict[str, Any], plan: Any) -> dict[str, Any]:
    found = deviations(cell, result)
    bound = BOUNDS[cell.precision]
    precision = plan.precision
    return {
        **vars(cell), **found, "bound": bound,
        "holds": max(found["update"], found["loss"], found["gradient_norm"]) <= bound,
        "overrides": cell.words(ranks),
        "dtypes": [precision.parameter_dtype, precision.compute_dtype, precision.reduce_dtype],
        "held": result["held"], "collectives": result.get("collectives"),
    }  # fmt: skip


def stock(ranks: int, accelerator: str, timeout: float) -> list[dict[str, Any]]:
    found = []
    for name in STOCK:  # each in processes of its own: they leave state behind
        if name == "FSDPStrategy" and accelerator == "cpu":
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                spawn(ranks, run_stock, Path(folder), ranks, [name], accelerator, timeout_seconds=timeout)
            except AssertionError as error:
                print(str(error)[-3000:], flush=True)
            file = Path(folder) / "stock.jsonl"
            found += [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accelerator", choices=["cuda", "cpu"], default="cpu")
    parser.add_argument("--ranks", help="comma-separated; default: 1, 2, 4 on the CPU, of 2, 4, 8 what there is")
    parser.add_argument("--only", default="", help="a regular expression: cells to measure, and no stock")
    parser.add_argument("--timeout", type=float, default=300, help=f"seconds for {PART} cells")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--stock-only", action="store_true", help="the recorded cells stay")
    parser.add_argument("--commit", help="of this code, where it was copied without its history")
    arguments = parser.parse_args()
    there = torch.cuda.device_count()
    default = [1, 2, 4] if arguments.accelerator == "cpu" else [n for n in (2, 4, 8) if n <= there]
    environment, device = measured_on(arguments)
    for ranks in [int(n) for n in arguments.ranks.split(",")] if arguments.ranks else default:
        began = time.monotonic()
        result: dict[str, Any] = {
            "command": shlex.join(["python", "benchmarks/parity_matrix.py", *sys.argv[1:]]),
            "ranks": ranks, "environment": environment, "cells": [], "stock": [],
            "settings": {"steps": STEPS, "global_batch_size": BATCH, "clip": CLIP, "weight_decay": WEIGHT_DECAY},
        }  # fmt: skip
        arguments.out.mkdir(parents=True, exist_ok=True)
        path = arguments.out / f"matrix-{device}-x{ranks}.json"
        if arguments.stock_only:
            recorded = json.loads(path.read_text())
            result |= {key: recorded[key] for key in ("cells", "command", "environment")}
        for part in (
            () if arguments.stock_only else measured(ranks, arguments.accelerator, arguments.only, arguments.timeout)
        ):
            result["cells"] += part
            path.write_text(json.dumps(result, indent=1) + "\n")
            bad = [row for row in part if not row.get("holds")]
            print(
                f"{ranks} ranks: {len(result['cells'])} cells, {time.monotonic() - began:.0f} s; not: {bad}", flush=True
            )
        if ranks == 2 and not arguments.only:
            rows_of_stock = stock(ranks, arguments.accelerator, arguments.timeout)
            result["stock"] = [{**row, "commit": environment["commit"]} for row in rows_of_stock]
            path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
