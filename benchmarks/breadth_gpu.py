"""Every strategy in fp32, bf16 and fp16 on GPUs: step time and peak memory, beside stock Lightning.

    python benchmarks/breadth_gpu.py                all GPUs of this machine, and 2 of them
    python benchmarks/breadth_gpu.py --ranks 2      two

A 124 M language model and ResNet-50, random data in memory, AdamW, accumulation 2, the same settings for both. And what
fp16 does when the gradients of one rank overflow in one step. Writes benchmarks/results/breadth-<gpu>-x<ranks>.json.
`--accelerator cpu --tiny` is for trying it out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
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
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from lightning.pytorch import Callback, LightningDataModule, Trainer  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from shardwise.config.compose import compose  # noqa: E402
from shardwise.config.targets import build  # noqa: E402
from shardwise.distributed.process_group import init_process_group  # noqa: E402
from shardwise.optim.optimizers import parameter_groups  # noqa: E402
from shardwise.parallel.precision import set_matmul_mode  # noqa: E402
from shardwise.plan import Host, Plan, make_plan  # noqa: E402
from shardwise.rank import quiet_lightning  # noqa: E402
from shardwise.run_dir.environment import describe_environment  # noqa: E402
from shardwise.trainer import build_data, build_module, build_trainer  # noqa: E402
from tests.harness.processes import spawn  # noqa: E402

STEPS, WARM_UP = 9, 3
ACCUMULATE = 2
NOTHING_ELSE = ["checkpoint=none", "schedule=none", "log_every_n_steps=1000", "validate_every_n_steps=1000000"]

MODELS = {
    "gpt2_124m": [
        "model=gpt2_124m", "data._target_=benchmarks.breadth_gpu.Noise", "~data.corpus", "~data.directory",
        "~data.max_validation_sequences", "~data.num_workers", "data.sequence_length=1024",
        "+data.vocab_size=${model.vocab_size}",
        "micro_batch_size=8",
        "module.sample_tokens=0", "optimizer.lr=1e-4",
    ],
    "resnet50": [
        "recipe=image_classification", "model=resnet50", "data=synthetic_images", "data.num_workers=0",
        "micro_batch_size=64", "module.channels_last=true", "module.augment=null", "optimizer.lr=1e-4",
    ],
}  # fmt: skip
TINY = {
    "gpt2_124m": ["model.dim=32", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=2", "model.ffn_dim=48",
                  "model.vocab_size=64",
                  "data.sequence_length=16", "micro_batch_size=2"],
    "resnet50": ["model.layers=[3,4,6,3]", "model.width=8", "data.image_size=32", "micro_batch_size=4"],
}  # fmt: skip

STRATEGIES: dict[str, list[str]] = {
    **{name: [f"strategy={name}"] for name in ("ddp", "fsdp", "fsdp_hybrid", "zero1", "zero2", "zero3")},
    "zero1, optimizer offloaded": ["strategy=zero1", "strategy.offload_optimizer=true"],
    "zero2, optimizer offloaded": ["strategy=zero2", "strategy.offload_optimizer=true"],
    "zero3, all offloaded": ["strategy=zero3", "strategy.offload_optimizer=true", "strategy.offload_parameters=true"],
}
STOCK_PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class Noise(LightningDataModule):
    """Random tokens."""

    def __init__(self, batch_size: int, sequence_length: int, vocab_size: int) -> None:
        super().__init__()
        self.batch_size, self.sequence_length, self.vocab_size = batch_size, sequence_length, vocab_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            _Tokens(self.sequence_length, self.vocab_size),
            batch_size=self.batch_size,
            pin_memory=torch.cuda.is_available(),
        )


class _Tokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, length: int, vocab_size: int) -> None:
        self.rows = torch.randint(0, vocab_size, (64, length + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index % len(self.rows)]
        return {"tokens": row[:-1], "targets": row[1:]}


class Timer(Callback):
    """Seconds a step, between two synchronisations; peak memory of the whole run."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == WARM_UP * ACCUMULATE:
            _synchronize()
            self.begin = time.perf_counter()
        if batch_idx + 1 == STEPS * ACCUMULATE:
            _synchronize()
            self.seconds = (time.perf_counter() - self.begin) / (STEPS - WARM_UP)

    def result(self) -> dict[str, Any]:
        return {"seconds_per_step": self.seconds, **_peak()}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _peak(*, anew: bool = False) -> dict[str, float]:
    if not torch.cuda.is_available():
        return {}
    if anew:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return {
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def plan_of(folder: Path, ranks: int, model: str, strategy: str, precision: str, options: dict[str, Any]) -> Plan:
    words = [*MODELS[model], *(TINY[model] if options["tiny"] else [])]
    [micro] = [w.split("=")[1] for w in words if w.startswith("micro_batch_size=")][-1:]
    if strategy == "fsdp_hybrid":
        words.append(f"strategy.shard_size={max(1, ranks // 2)}")
    words += [*STRATEGIES[strategy], f"precision={precision}", f"devices={ranks}", f"global_batch_size="
              f"{int(micro) * ranks * ACCUMULATE}", f"max_steps={STEPS}", "gradient_clip_val=1.0",
              f"accelerator={options['accelerator']}", f"runs_dir={folder}", *NOTHING_ELSE]  # fmt: skip
    name = re.sub(r"[^a-z0-9]+", "-", f"{model} {strategy} {precision} {time.monotonic_ns()}")
    [job] = compose([*words, f"name={name}"]).jobs
    plan = make_plan(job.config, Host(cuda_devices=torch.cuda.device_count()))
    Path(plan.run_dir).mkdir(parents=True, exist_ok=True)
    return plan


def ours(plan: Plan) -> dict[str, Any]:
    module, timer = build_module(plan), Timer()
    trainer = build_trainer(plan, module)
    trainer.callbacks = [c for c in trainer.callbacks if type(c).__name__ != "Summary"] + [timer]  # type: ignore[attr-defined]
    trainer.fit(module, datamodule=build_data(plan))
    inside = [type(getattr(o, "optimizer", o)).__name__ for o in trainer.optimizers]
    return {**timer.result(), "optimizer": inside[0], "overrides": STRATEGIES.get(plan.strategy.name)}


def stock(plan: Plan, strategy: str) -> dict[str, Any]:
    """The same module and data under the Trainer that Lightning gives."""
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
    timer = Timer()
    trainer = Trainer(
        accelerator="gpu" if plan.accelerator == "cuda" else "cpu",
        devices=plan.topology.devices,
        strategy=stock_strategy(plan, offload, module),
        precision=STOCK_PRECISION[plan.precision.name],  # type: ignore[arg-type]
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=None if plan.strategy.name.startswith("fsdp") else 1.0,  # its FSDPStrategy refuses
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[timer],
        default_root_dir=plan.run_dir,
    )
    trainer.fit(module, datamodule=build_data(plan))
    return timer.result()


def stock_strategy(plan: Plan, offload: bool, module: Any) -> Any:
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

    name = plan.strategy.name
    if name == "ddp":
        return DDPStrategy()
    if name in ("fsdp", "fsdp_hybrid"):
        from shardwise.parallel.units import find_units

        wrap = {type(unit) for _, unit in find_units(module).modules}
        if name == "fsdp":
            return FSDPStrategy(auto_wrap_policy=wrap)
        mesh = (plan.topology.replicate, plan.topology.shard)
        return FSDPStrategy(auto_wrap_policy=wrap, sharding_strategy="HYBRID_SHARD", device_mesh=mesh)
    parameters = offload and plan.strategy.zero_stage == 3
    return DeepSpeedStrategy(stage=plan.strategy.zero_stage, offload_optimizer=offload, offload_parameters=parameters)


def run_cells(folder: Path, ranks: int, cells: list[tuple[str, str, str, str]], options: dict[str, Any]) -> None:
    """In each rank: cell after cell; rank 0 writes each result down as soon as it is there."""
    quiet_lightning()
    for who, model, strategy, precision in cells:
        plan = plan_of(folder, ranks, model, strategy, precision, options)
        if not dist.is_initialized():
            init_process_group(plan)
        set_matmul_mode(plan.precision)
        dist.barrier()
        row: dict[str, Any] = {"who": who, "model": model, "strategy": strategy, "precision": precision}
        before = _peak(anew=True)
        try:
            row |= ours(plan) if who == "shardwise" else stock(plan, strategy)
            row |= {name: row[name] - held for name, held in before.items()}  # DeepSpeed leaves memory behind
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"[:500]
        if dist.get_rank() == 0:
            with (folder / "rows.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        gc.collect()


def overflow(folder: Path, ranks: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """fp16 under every strategy; in the third window the last rank's gradients do not fit."""
    quiet_lightning()
    rows = []
    names = ["ddp", "fsdp", "fsdp_hybrid", "zero1", "zero2", "zero3"]
    for name in names if options["accelerator"] == "cuda" else names[:3]:
        plan = plan_of(folder, ranks, "gpt2_124m", name, "fp16", {**options, "tiny": True})
        if not dist.is_initialized():
            init_process_group(plan)
        module = build_module(plan)
        step = module.training_step

        def training_step(batch: Any, batch_idx: int, step: Any = step) -> Any:
            bad = batch_idx // ACCUMULATE == 2 and dist.get_rank() == ranks - 1
            return step(batch, batch_idx) * (1e30 if bad else 1.0)

        class Look(Callback):
            def __init__(self) -> None:
                self.rows: list[dict[str, Any]] = []

            def on_train_batch_end(
                self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
            ) -> None:
                if (batch_idx + 1) % ACCUMULATE == 0:
                    scale = trainer.strategy.planned_precision.loss_scale
                    self.rows.append({"global_step": trainer.global_step, "loss_scale": scale})

            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                self.finite = all(bool(p.isfinite().all()) for p in trainer.strategy.full_parameters().values())

        module.training_step = training_step  # type: ignore[method-assign]
        look, trainer = Look(), build_trainer(plan, module)
        trainer.callbacks = [c for c in trainer.callbacks if type(c).__name__ != "Summary"] + [look]  # type: ignore[attr-defined]
        trainer.fit(module, datamodule=build_data(plan))
        rows.append(
            {
                "strategy": name,
                "windows": look.rows,
                "skipped_steps": trainer.strategy.skipped_steps,  # type: ignore[attr-defined]
                "finite": look.finite,
            }
        )
    return rows


def measure(ranks: int, options: dict[str, Any], folder: Path, commit: str | None) -> Iterator[list[dict[str, Any]]]:
    """The rows of one model and one contender at a time."""
    for model in options["models"]:
        for who in ("shardwise", "stock Lightning"):
            cells = [
                (who, model, strategy, precision)
                for precision in ("fp32", "bf16", "fp16")
                for strategy in STRATEGIES
                if precision == "bf16" or "offloaded" not in strategy
                if options["accelerator"] == "cuda"
                or (precision == "bf16" and (who == "shardwise" or strategy == "ddp"))
                if re.search(options["only"], f"{who} {model} {strategy} {precision}")
            ]
            if not cells:
                continue
            place = folder / re.sub(r"[^a-z0-9]+", "-", f"{model}-{who}".lower())
            place.mkdir(parents=True)
            try:
                spawn(ranks, run_cells, place, ranks, cells, options, timeout_seconds=options["timeout"])
            except AssertionError as error:
                print(f"{who} {model}: {str(error)[-2000:]}", flush=True)
            file = place / "rows.jsonl"
            new = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
            done = set(map(cell_of, new))
            new += [
                dict(zip(("who", "model", "strategy", "precision"), cell, strict=True)) | {"error": "did not end"}
                for cell in cells
                if cell not in done
            ]
            for row in new:
                row["commit"] = commit
                told = row.get("error") or f"{row['seconds_per_step']:.3f} s/step, " + ", ".join(
                    f"{k} {v:.2f}" for k, v in row.items() if k.startswith("peak")
                )
                print(f"{ranks} ranks  {who}  {model}  {row['strategy']}  {row['precision']}: {told}", flush=True)
            yield new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", help="comma-separated; default: 2 and all")
    parser.add_argument("--accelerator", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--models", default="gpt2_124m,resnet50")
    parser.add_argument("--tiny", action="store_true", help="small models, for trying it out")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for the cells of one model")
    parser.add_argument(
        "--only", default="", help="a regular expression: cells to measure, the others stay as recorded"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--commit", help="of this code, where it was copied without its history")
    arguments = parser.parse_args()
    there = torch.cuda.device_count()
    ranks = [int(r) for r in arguments.ranks.split(",")] if arguments.ranks else sorted({min(2, there), there})
    environment = describe_environment()
    gpu = environment["gpus"][0] if environment["gpus"] else "cpu"
    del environment["hostname"]
    environment["commit"] = arguments.commit or environment["commit"]
    options = {"accelerator": arguments.accelerator, "tiny": arguments.tiny, "timeout": arguments.timeout,
               "models": arguments.models.split(","), "only": arguments.only}  # fmt: skip
    for number in ranks:
        with tempfile.TemporaryDirectory() as name:
            result: dict[str, Any] = {
                "command": f"python benchmarks/breadth_gpu.py --ranks {number}",
                "ranks": number,
                "environment": environment,
                "settings": {"steps": STEPS, "warm_up": WARM_UP, "accumulate_grad_batches": ACCUMULATE,
                             "models": {m: [*MODELS[m], *(TINY[m] if arguments.tiny else [])]
                                        for m in options["models"]}},
            }  # fmt: skip
            path = arguments.out / f"breadth-{re.sub(r'[^a-z0-9]+', '-', gpu.lower())}-x{number}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            before = json.loads(path.read_text()) if path.exists() else {"cells": []}
            try:
                result["overflow"] = spawn(number, overflow, Path(name), number, options, timeout_seconds=120)[0]
                for row in result["overflow"]:
                    print(f"{number} ranks  overflow  {row['strategy']}: skipped {row['skipped_steps']}, "
                          f"finite {row['finite']}, {row['windows']}", flush=True)  # fmt: skip
            except AssertionError as error:
                print(f"overflow: {str(error)[-2000:]}", flush=True)
            result["cells"] = before["cells"]
            for cells in measure(number, options, Path(name), environment["commit"]):
                again = set(map(cell_of, cells))
                result["cells"] = [c for c in result["cells"] if cell_of(c) not in again] + cells
                path.write_text(json.dumps(result, indent=1) + "\n")  # at once: what is cut short keeps what it has


def cell_of(row: dict[str, Any]) -> tuple[str, ...]:
    return row["who"], row["model"], row["strategy"], row["precision"]


if __name__ == "__main__":
    main()
