"""Every strategy, every layout of tensor, context and pipeline axes, and stock Lightning's strategies, compared with a
plain one-process loop: the data of docs/parity.md.

    make parity        CPU, gloo: 1, 2, 4 and 8 ranks
    make parity-gpu    NCCL: as many of 2, 4 and 8 GPUs as there are (ARGS="--ranks 2": two)

`--only ^Divided` measures the layouts alone, `--only ^Cell` the strategies. Writes benchmarks/results/
matrix-<device>-x<ranks>.json (strategies) and axes-<device>-x<ranks>.json (layouts) as it goes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from lightning.pytorch import LightningModule  # noqa: E402
from lightning.pytorch import strategies as lightning_strategies  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.limits import note, noted, on_ranks  # noqa: E402
from benchmarks.harness.trainers import stock_trainer  # noqa: E402
from shardwise.distributed.mesh import init_process_group  # noqa: E402
from shardwise.plan import Plan  # noqa: E402
from shardwise.rank import quiet_lightning  # noqa: E402
from tests.harness import axes  # noqa: E402
from tests.harness.divided import run_divided  # noqa: E402
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
from tests.harness.reference import OPTIMIZERS, WEIGHT_DECAY, groups_of, update_deviation  # noqa: E402

# Cells that share a group of processes, times the ranks. What hangs or dies costs the others little, and every cell
# leaves groups behind, whose threads a machine with few cores feels.
PART = 60
# Clipping hides a gradient that was divided twice, so that one cell is without it.
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


def run_stock(folder: Path, ranks: int, name: str, accelerator: str) -> None:
    """In each rank: one of Lightning's own strategies, on the same rows; rank 0 writes each result down at once."""
    quiet_lightning()
    for number, cell in enumerate(STOCK_CELLS):
        plan = plan_of(cell, ranks, folder / f"{number}", accelerator)
        if not dist.is_initialized():
            init_process_group(plan)
        row = {"strategy": name, "optimizer": cell.optimizer, "accumulate": cell.accumulate, "clip": cell.clip}
        try:
            row["update"] = stock_update(folder, name, cell, plan)
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        note(folder, row)


def stock_update(folder: Path, name: str, cell: Cell, plan: Plan) -> float:
    """The largest deviation of an update under one of Lightning's strategies from the plain loop's."""
    module, size = Stock(cell.optimizer), plan.micro_batch_size
    ranks, rank = dist.get_world_size(), dist.get_rank()
    batches = [list(range(i, i + size)) for i in range(rank * size, 48, ranks * size)]
    trainer = stock_trainer(
        plan.accelerator, ranks, folder, max_steps=STEPS, strategy=stock_strategy(name, plan.accelerator),
        accumulate_grad_batches=cell.accumulate, gradient_clip_val=cell.clip, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows(), batch_sampler=batches))  # type: ignore[arg-type]
    start, final, *_ = reference("fp32", cell.optimizer, cell.clip, False)
    trained = [n for n in start if not torch.equal(start[n], final[n])]
    ours = {n: module.final[n.removeprefix("network.")] for n in trained}
    return max(update_deviation({n: start[n] for n in trained}, ours, final).values())


@dataclass
class Matrix:
    """Cells that share a file of results."""

    file: str
    cells: list[Any]
    run: Callable[..., list[Any]]  # in each rank: what each of some cells gives
    row: Callable[[Any, list[Any]], dict[str, Any]]  # of a cell and what each rank found
    settings: dict[str, Any]


def matrices(ranks: int, accelerator: str, only: str) -> list[Matrix]:
    """The strategies and the layouts; without those of which `only` leaves no cell."""

    def row_of_strategy(cell: Cell, found: list[Any]) -> dict[str, Any]:
        return row_of(cell, ranks, found[0], accelerator)

    def row_of_layout(cell: axes.Divided, found: list[Any]) -> dict[str, Any]:
        return axes.row_of(names[cell], cell, found, accelerator)

    names = axes.axes_cells(ranks)
    settings = {"steps": STEPS, "global_batch_size": BATCH, "clip": CLIP, "weight_decay": WEIGHT_DECAY}
    both = [
        Matrix("matrix", all_cells(ranks), run_strategies, row_of_strategy, settings),
        Matrix("axes", list(names), run_divided, row_of_layout, axes.SETTINGS),
    ]
    for one in both:
        one.cells = [cell for cell in one.cells if re.search(only, str(cell))]
    return [one for one in both if one.cells]


def run_strategies(folder: Path, ranks: int, cells: list[Cell], accelerator: str) -> list[Any]:
    """In each rank."""
    return list(run_cells(folder, ranks, cells, accelerator).values())


def measured(matrix: Matrix, ranks: int, accelerator: str, timeout: float) -> Any:
    """Rows of the matrix, a part at a time."""
    size = PART // ranks
    for first in range(0, len(matrix.cells), size):
        part = matrix.cells[first : first + size]
        with tempfile.TemporaryDirectory() as name:
            try:
                found = on_ranks(ranks, matrix.run, Path(name), ranks, part, accelerator, timeout_seconds=timeout)
            except AssertionError as error:
                print(str(error)[-3000:], flush=True)
                yield [{**vars(cell), "error": str(error)[-500:]} for cell in part]
                continue
            yield [matrix.row(cell, of_ranks) for cell, *of_ranks in zip(part, *found, strict=True)]


def row_of(cell: Cell, ranks: int, result: dict[str, Any], accelerator: str) -> dict[str, Any]:
    found = deviations(cell, result)
    bound = BOUNDS[cell.precision]
    with tempfile.TemporaryDirectory() as name:
        precision = plan_of(cell, ranks, Path(name) / "plan", accelerator).precision
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
                on_ranks(ranks, run_stock, Path(folder), ranks, name, accelerator, timeout_seconds=timeout)
            except AssertionError as error:
                print(str(error)[-3000:], flush=True)
            found += noted(Path(folder))
    return found


def main() -> None:
    parser = results.command_line(__doc__, accelerator="cpu")
    parser.add_argument("--ranks", type=results.numbers, help="default: 1,2,4,8 on the CPU, of 2,4,8 what there is")
    parser.add_argument("--only", default="", help="a regular expression: cells to measure, and no stock")
    parser.add_argument("--timeout", type=float, default=300, help=f"seconds for {PART} / ranks cells")
    parser.add_argument("--stock-only", action="store_true", help="the recorded cells stay")
    arguments = parser.parse_args()
    there = torch.cuda.device_count()
    default = [1, 2, 4, 8] if arguments.accelerator == "cpu" else [n for n in (2, 4, 8) if n <= there]
    environment, device = results.measured_on(arguments.accelerator, arguments.commit)
    for ranks in arguments.ranks or default:
        head = {"command": results.command(), "ranks": ranks, "environment": environment}
        for matrix in [] if arguments.stock_only else matrices(ranks, arguments.accelerator, arguments.only):
            result = head | {"cells": [], "stock": [], "settings": matrix.settings}
            measure(matrix, ranks, arguments, result, arguments.out / f"{matrix.file}-{device}-x{ranks}.json")
        if ranks == 2 and not arguments.only:
            path = arguments.out / f"matrix-{device}-x{ranks}.json"
            result = json.loads(path.read_text())
            rows_of_stock = stock(ranks, arguments.accelerator, arguments.timeout)
            result["stock"] = [{**row, "commit": environment["commit"]} for row in rows_of_stock]
            results.write(path, result)


def measure(matrix: Matrix, ranks: int, arguments: argparse.Namespace, result: dict[str, Any], path: Path) -> None:
    """Fills the result's cells, and writes it after each part of them."""
    began = time.monotonic()
    for part in measured(matrix, ranks, arguments.accelerator, arguments.timeout):
        result["cells"] += part
        results.write(path, result)
        bad = [row for row in part if not row.get("holds")]
        print(f"{ranks} ranks: {len(result['cells'])} cells, {time.monotonic() - began:.0f} s; not: {bad}", flush=True)


if __name__ == "__main__":
    main()
