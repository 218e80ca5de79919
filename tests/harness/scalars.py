"""Modules with parameters without a dimension or without elements, trained and resumed under every strategy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import ConfigError
from shardwise.run_dir.checkpoints import list_checkpoints
from tests.harness.anybodys_module import RANKS, plan_for, words_for
from tests.harness.cells import fit
from tests.harness.reference import update_deviation

CELLS = [
    *[(strategy, "fp32") for strategy in ("ddp", "fsdp", "fsdp_hybrid", "zero1", "zero3")],
    *[(strategy, "bf16") for strategy in ("ddp", "fsdp", "zero3")],
    *[(strategy, "fp16") for strategy in ("ddp", "fsdp")],
]
BOUNDS = {"fp32": 1e-5, "bf16": 0.01, "fp16": 0.01}  # of an update's deviation from that under ddp
# From which strategy's checkpoint of step 2 each goes on
RESUMED = [("fsdp", "zero3"), ("zero3", "fsdp"), ("ddp", "fsdp")]
SAVE = ["checkpoint.save_every_n_steps=2", "checkpoint.keep_last=9", "gradient_clip_val=1.0"]


def run(folder: Path, accelerator: str = "cpu") -> dict[Any, Any]:
    """In each rank."""
    done: dict[Any, Any] = {}
    save = [f"accelerator={accelerator}", *SAVE]
    for strategy, precision in CELLS:
        plan = plan_for(
            folder / f"{strategy}-{precision}", "Scalars", RANKS, *words_for(strategy), f"precision={precision}", *save
        )
        done[strategy, precision] = fit(plan)
    for strategy, source in RESUMED:
        plan = plan_for(folder / f"{strategy}-of-{source}", "Scalars", RANKS, *words_for(strategy), *save)
        (first, _) = list_checkpoints(folder / f"{source}-fp32")
        assert "00000002" in first.name
        done["resumed", strategy, source] = fit(dataclasses.replace(plan, resume=str(first)))
    for strategy in ("fsdp", "zero2", "zero3"):
        plan = plan_for(folder / f"hollow-{strategy}", "Hollow", RANKS, *words_for(strategy), "max_steps=1", *save)
        try:
            fit(plan)
            done["hollow", strategy] = "done"
        except ConfigError as error:
            done["hollow", strategy] = str(error)
    return done


def off(done: dict[Any, Any], key: Any, base: Any) -> float:
    start, base_final = done["ddp", "fp32"]["start"], done[base]["final"]
    trained = [name for name in start if not torch.equal(start[name], base_final[name])]
    assert len(trained) == len(start) - 1  # one is frozen
    assert done[key]["final"]["temperature"].shape == ()
    parts = ({name: weights[name] for name in trained} for weights in (start, done[key]["final"], base_final))
    return max(update_deviation(*parts).values())
