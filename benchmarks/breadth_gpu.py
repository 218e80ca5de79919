"""Every strategy in fp32, bf16 and fp16 on GPUs: step time and peak memory, compared with stock Lightning.

    python benchmarks/breadth_gpu.py                all GPUs of this machine, and 2 of them
    python benchmarks/breadth_gpu.py --ranks 2      two
    python benchmarks/breadth_gpu.py --ranks 2 --models llama3_1b,llama3_8b      large models, in bf16

A 124 M language model and ResNet-50, random data in memory, AdamW, accumulation 2, the same settings for both. The
result also has what fp16 does when the gradients of one rank overflow in one step. Llama runs once more as a user would
run it, compiled and with the fast kernels. Writes
benchmarks/results/breadth-<gpu>-x<ranks>.json. `--accelerator cpu --tiny` tries it out, with a file of its own.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from lightning.pytorch import Callback  # noqa: E402

from benchmarks.harness import results, trainers  # noqa: E402
from benchmarks.harness.breadth_cells import (  # noqa: E402
    COMPILED,
    MODELS,
    OURS,
    STOCK,
    STRATEGIES,
    TINY,
    cell_of,
    cells_for,
    fast_words,
    in_one_process,
    rows_of,
    with_rows,
)
from benchmarks.harness.clock import StepTimer  # noqa: E402
from benchmarks.harness.device import device_of, free_memory, peaks_gib, two_and_all  # noqa: E402
from benchmarks.harness.limits import note, noted, on_ranks  # noqa: E402
from shardwise.config.targets import build  # noqa: E402
from shardwise.distributed.mesh import init_process_group  # noqa: E402
from shardwise.optim.optimizers import parameter_groups  # noqa: E402
from shardwise.parallel.precision import set_matmul_mode  # noqa: E402
from shardwise.plan import Plan  # noqa: E402
from shardwise.rank import quiet_lightning  # noqa: E402
from shardwise.trainer import build_data, build_module  # noqa: E402

STEPS, WARM_UP = 11, 5  # of two batches each; writes into weights are looked for in the first nine
ACCUMULATE = 2
NOTHING_ELSE = ["checkpoint=none", "schedule=none", "log_every_n_steps=1000", "validate_every_n_steps=1000000"]

WHO = (OURS, COMPILED, STOCK)
STOCK_PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def plan_of(
    folder: Path, ranks: int, model: str, strategy: str, precision: str, options: dict[str, Any], who: str = OURS
) -> Plan:
    words = [*MODELS[model], *(TINY[model] if options["tiny"] else [])]
    if strategy == "fsdp_hybrid":
        words.append(f"strategy.shard_size={max(1, ranks // 2)}")
    words += [*STRATEGIES[strategy], *_added(who, strategy, options), f"precision={precision}", f"max_steps={STEPS}",
              "gradient_clip_val=1.0", *NOTHING_ELSE]  # fmt: skip
    name = re.sub(r"[^a-z0-9]+", "-", f"{model} {strategy} {precision} {time.monotonic_ns()}")
    return trainers.resolve(trainers.on_all(words, ranks, ACCUMULATE), options["accelerator"], folder, name)


def _added(who: str, strategy: str, options: dict[str, Any]) -> list[str]:
    return fast_words(options["accelerator"], strategy) if who == COMPILED else []


def timer_of(plan: Plan) -> StepTimer:
    return StepTimer(device_of(plan.accelerator), WARM_UP, STEPS - WARM_UP, ACCUMULATE)


def ours(plan: Plan) -> dict[str, Any]:
    module, timer = build_module(plan), timer_of(plan)
    trainer = trainers.our_trainer(plan, module, timer)
    trainer.fit(module, datamodule=build_data(plan))
    inside = [type(getattr(o, "optimizer", o)).__name__ for o in trainer.optimizers]
    return {**timer.result(), "optimizer": inside[0], "overrides": STRATEGIES.get(plan.strategy.name),
            "attention": plan.chosen_attention.name, "loss": plan.chosen_loss.name,
            "symmetric_memory": trainer.strategy.plan.strategy.symmetric_memory}  # fmt: skip


def stock(plan: Plan, strategy: str) -> dict[str, Any]:
    """The same module and data under the Trainer that Lightning gives."""
    with device_of(plan.accelerator):  # 8 B take minutes to draw on a CPU
        module = build(plan.module, "module")
    for layer in module.modules():
        if any(True for _ in layer.parameters(recurse=False)):
            with torch.no_grad():
                module.init_module_weights(layer)
    offload = "offloaded" in strategy

    def configure_optimizers() -> Any:
        if offload:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return DeepSpeedCPUAdam(parameter_groups(module, 0.1), lr=1e-4, betas=(0.9, 0.95))
        # Its MixedPrecision refuses to clip before a fused optimizer: there it gets the one that it takes.
        fused = plan.accelerator == "cuda" and not (plan.strategy.name == "ddp" and plan.precision.name != "fp32")
        return torch.optim.AdamW(parameter_groups(module, 0.1), lr=1e-4, betas=(0.9, 0.95), fused=fused)

    module.configure_optimizers = configure_optimizers
    timer = timer_of(plan)
    trainer = trainers.stock_trainer(
        plan.accelerator,
        plan.topology.devices,
        plan.run_dir,
        strategy=trainers.stock_strategy(plan, module, offload=offload),
        precision=STOCK_PRECISION[plan.precision.name],
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=None if plan.strategy.name.startswith("fsdp") else 1.0,  # its FSDPStrategy refuses
        callbacks=[timer],
    )
    trainer.fit(module, datamodule=build_data(plan))
    return timer.result()


def begin(plan: Plan) -> None:
    if not dist.is_initialized():
        init_process_group(plan)
    set_matmul_mode(plan.precision)


def run_cells(folder: Path, ranks: int, cells: list[tuple[str, str, str, str]], options: dict[str, Any]) -> None:
    """In each rank: cell after cell; rank 0 writes each result down as soon as it is there."""
    quiet_lightning()
    device = device_of(options["accelerator"])
    for who, model, strategy, precision in cells:
        plan = plan_of(folder, ranks, model, strategy, precision, options, who)
        begin(plan)
        dist.barrier()
        row: dict[str, Any] = {"who": who, "model": model, "strategy": strategy, "precision": precision,
                               "added": _added(who, strategy, options)}  # fmt: skip
        free_memory(device)
        before = peaks_gib(device)
        try:
            row |= stock(plan, strategy) if who == STOCK else ours(plan)
            row |= {name: row[name] - held for name, held in before.items()}  # DeepSpeed leaves memory behind
            if "sequence_length" in plan.data:
                tokens = plan.data["sequence_length"] * plan.micro_batch_size * ACCUMULATE
                row["tokens_per_second_per_gpu"] = round(tokens / row["seconds_per_step"], 1)
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"[:500]
        note(folder, row)


class EachWindow(Callback):
    """The step counter and the loss scale after each window, and whether the weights are finite at the end."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % ACCUMULATE == 0:
            scale = trainer.strategy.planned_precision.loss_scale
            self.rows.append({"global_step": trainer.global_step, "loss_scale": scale})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.finite = all(bool(p.isfinite().all()) for p in trainer.strategy.sharded.full_parameters().values())


def overflow(folder: Path, ranks: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """fp16 under every strategy; in the third window the last rank's gradients do not fit."""
    quiet_lightning()
    names = ["ddp", "fsdp", "fsdp_hybrid", "zero1", "zero2", "zero3"]
    return [
        overflow_under(name, folder, ranks, options)
        for name in (names if options["accelerator"] == "cuda" else names[:3])
    ]


def overflow_under(strategy: str, folder: Path, ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    plan = plan_of(folder, ranks, "gpt2_124m", strategy, "fp16", {**options, "tiny": True})
    begin(plan)
    module = build_module(plan)
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        bad = batch_idx // ACCUMULATE == 2 and dist.get_rank() == ranks - 1
        return step(batch, batch_idx) * (1e30 if bad else 1.0)

    module.training_step = training_step  # type: ignore[method-assign]
    windows = EachWindow()
    trainer: Any = trainers.our_trainer(plan, module, windows)
    trainer.fit(module, datamodule=build_data(plan))
    skipped = trainer.strategy.step.verdict.skipped_steps
    return {"strategy": strategy, "windows": windows.rows, "skipped_steps": skipped, "finite": windows.finite}


def measure(ranks: int, options: dict[str, Any], folder: Path, commit: str | None) -> Iterator[list[dict[str, Any]]]:
    """The rows of one model and one contender at a time."""
    for model in options["models"]:
        for who in WHO:
            wanted = [cell for cell in options["cells"] if cell[:2] == (who, model)]
            for number, cells in enumerate(in_one_process(model, wanted)):
                place = folder / re.sub(r"[^a-z0-9]+", "-", f"{model}-{who}-{number}".lower())
                place.mkdir(parents=True)
                try:
                    on_ranks(ranks, run_cells, place, ranks, cells, options, timeout_seconds=options["timeout"])
                except AssertionError as error:
                    print(f"{who} {model}: {str(error)[-2000:]}", flush=True)
                yield [row | {"commit": commit} for row in rows_of(cells, noted(place))]


def show(ranks: int, row: dict[str, Any]) -> None:
    peaks = ", ".join(f"{k} {v:.2f}" for k, v in row.items() if k.startswith("peak"))
    words = row.get("error") or f"{row['seconds_per_step']:.3f} s/step, {peaks}"
    print(f"{ranks} ranks  {row['who']}  {row['model']}  {row['strategy']}  {row['precision']}: {words}", flush=True)


def overflow_rows(ranks: int, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The result's `overflow`; nothing where it could not be measured."""
    try:
        rows = on_ranks(ranks, overflow, folder, ranks, options, timeout_seconds=120)[0]
    except AssertionError as error:
        print(f"overflow: {str(error)[-2000:]}", flush=True)
        return {}
    for row in rows:
        print(f"{ranks} ranks  overflow  {row['strategy']}: skipped {row['skipped_steps']}, "
              f"finite {row['finite']}, {row['windows']}", flush=True)  # fmt: skip
    return {"overflow": rows}


def look_at(before: dict[str, Any]) -> None:
    list(map(cell_of, before["cells"])), {} | before["settings"]["models"]


def main() -> None:
    parser = results.command_line(__doc__)
    parser.add_argument("--ranks", type=results.numbers, help="comma-separated; default: 2 and all")
    parser.add_argument("--models", type=results.names(MODELS), default="gpt2_124m,resnet50")
    parser.add_argument("--tiny", action="store_true", help="small models, for trying it out")
    parser.add_argument("--timeout", type=results.seconds, default=300, help="seconds for the cells of one process")
    parser.add_argument(
        "--only", default="", help="a regular expression: cells to measure, the others stay as recorded"
    )
    arguments = parser.parse_args()
    results.end_on_signals()
    environment, device = results.measured_on(arguments.accelerator, arguments.commit)
    words = {m: [*MODELS[m], *(TINY[m] if arguments.tiny else [])] for m in arguments.models}
    cells = [cell for model in words for who in WHO for cell in cells_for(who, model, arguments.accelerator)]
    only = results.chosen(arguments.only, map(" ".join, cells))
    options = vars(arguments) | {"cells": [cell for cell in cells if " ".join(cell) in only]}
    name = f"breadth-{device}-x{{}}{'-tiny' if arguments.tiny else ''}.json"
    paths = {number: arguments.out / name.format(number) for number in arguments.ranks or two_and_all()}
    earlier = {number: results.earlier(path, look_at) for number, path in paths.items()}
    failed = False
    for number, before in earlier.items():
        with tempfile.TemporaryDirectory() as folder:
            result: dict[str, Any] = {
                "command": f"python benchmarks/breadth_gpu.py --ranks {number}",
                "ranks": number,
                "tiny": arguments.tiny,
                "environment": environment,
                "settings": {"steps": STEPS, "warm_up": WARM_UP, "accumulate_grad_batches": ACCUMULATE,
                             "models": before.get("settings", {}).get("models", {}) | words},
                "overflow": before.get("overflow", []),
                "cells": before.get("cells", []),
            }  # fmt: skip
            if "gpt2_124m" in words:
                overflowed = overflow_rows(number, Path(folder), options)
                result |= overflowed
                failed |= not overflowed
            for rows in measure(number, options, Path(folder), environment["commit"]):
                result["cells"] = with_rows(result["cells"], rows)
                results.write(paths[number], result)
                failed |= any("error" in row for row in rows)
                for row in rows:
                    show(number, row)
    if failed:
        sys.exit("error: a cell failed, see above; what was measured of it before is still in the file")


if __name__ == "__main__":
    main()
