"""A Plan of some words, our Trainer of it, and stock Lightning's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, Strategy

from shardwise.config.compose import compose
from shardwise.devices import gpu_capability
from shardwise.parallel.units import find_units
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.trainer import build_trainer

TINY_LANGUAGE_MODEL = [
    "model.dim=32", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=2", "model.ffn_dim=48",
    "model.vocab_size=64", "data.sequence_length=16", "micro_batch_size=2",
]  # fmt: skip


def resolve(words: list[str], accelerator: str, folder: Path, name: str) -> Plan:
    """The Plan of a command line. The folder of its run is there."""
    job = compose([*words, f"accelerator={accelerator}", f"runs_dir={folder}", f"name={name}"]).jobs[0]
    plan = make_plan(job.config, Host(cuda_devices=torch.cuda.device_count(), gpu_capability=gpu_capability()))
    Path(plan.run_dir).mkdir(parents=True, exist_ok=True)
    return plan


def on_all(words: list[str], ranks: int, accumulate: int = 1) -> list[str]:
    """The words, and the ranks and the global batch that go with them."""
    micro = [w.split("=")[1] for w in words if w.startswith("micro_batch_size=")][-1]
    return [*words, f"devices={ranks}", f"global_batch_size={int(micro) * ranks * accumulate}"]


def our_trainer(plan: Plan, module: LightningModule, *callbacks: Callback) -> Trainer:
    """What `python train.py` builds, without the summary, which draws a picture when all is over."""
    trainer = build_trainer(plan, module)
    kept = [c for c in trainer.callbacks if type(c).__name__ != "Summary"]  # type: ignore[attr-defined]
    trainer.callbacks = [*kept, *callbacks]  # type: ignore[attr-defined]
    return trainer


def stock_trainer(accelerator: str, ranks: int, folder: Path | str, **more: Any) -> Trainer:
    """Lightning's own, which does nothing besides training unless `more` says so."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
             "enable_model_summary": False, "limit_val_batches": 0}  # fmt: skip
    kind = "gpu" if accelerator == "cuda" else "cpu"
    return Trainer(accelerator=kind, devices=ranks, default_root_dir=folder, **(quiet | more))


def stock_strategy(plan: Plan, module: LightningModule, *, offload: bool) -> Strategy:
    """Lightning's own strategy for what the Plan names. `offload` is the optimizer's, under ZeRO-3 the parameters'
    too."""
    name = plan.strategy.name
    if name == "ddp":
        return DDPStrategy()
    if name in ("fsdp", "fsdp_hybrid"):
        wrap = {type(unit) for _, unit in find_units(module).modules}
        if name == "fsdp":
            return FSDPStrategy(auto_wrap_policy=wrap)
        mesh = (plan.topology.replicate, plan.topology.shard)
        return FSDPStrategy(auto_wrap_policy=wrap, sharding_strategy="HYBRID_SHARD", device_mesh=mesh)
    parameters = offload and plan.zero_stage == 3
    return DeepSpeedStrategy(stage=plan.zero_stage, offload_optimizer=offload, offload_parameters=parameters)
