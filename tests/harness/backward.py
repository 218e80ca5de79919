"""Modules whose backward pass finds weights gone unless their strategy sees to it, under each strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardwise.errors import ConfigError
from tests.harness.anybodys_module import MICRO, RANKS, plan_for, words_for
from tests.harness.cells import fit
from tests.harness.reference import update_deviation

MODULES = ("Steep", "Sensitive", "InPlace", "OfGraphs", "Forces", "Wgan")
CELLS = [
    *[(module, strategy, "fp64") for module in MODULES for strategy in ("ddp", "fsdp")],
    ("Steep", "fsdp_hybrid", "fp64"),
    *[(module, strategy, "fp32") for module in ("Steep", "Forces") for strategy in ("ddp", "zero2")],
    *[(module, strategy, "bf16") for module in ("Steep", "Forces") for strategy in ("ddp", "fsdp")],
    ("Steep", "fsdp", "fp64", "activation_checkpointing=full"),
]
BOUNDS = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 0.02}  # of an update's deviation from that under ddp
REFUSED = [
    ("Steep", ["strategy=zero3"], "Steep.training_step takes a gradient (torch.autograd.grad), and behind that"),
    ("Forces", ["strategy=zero3"], "Forces.training_step takes a gradient (torch.autograd.grad), and behind that"),
    ("Steep", ["strategy=ddp", "compile=layer"], "Steep differentiates a gradient (create_graph=True), which torch"),
    ("OfGraphs", ["strategy=zero3"], "Message passes tensors on inside an object, where zero3 does not find them"),
]


def run(folder: Path, accelerator: str = "cpu") -> dict[Any, Any]:
    """In each rank."""
    done: dict[Any, Any] = {}
    for cell in CELLS:
        module, strategy, precision, *more = cell
        words = [*words_for(strategy), f"precision={precision}", f"accelerator={accelerator}", *more]
        if module == "Wgan":
            words.append(f"global_batch_size={MICRO * RANKS}")
        done[cell] = fit(plan_for(folder / f"cell-{len(done)}", module, RANKS, *words))
    for number, (module, words, _) in enumerate(REFUSED):
        try:
            fit(plan_for(folder / f"refused-{number}", module, RANKS, f"accelerator={accelerator}", *words))
            done[number] = "nothing"
        except ConfigError as error:
            done[number] = str(error)
    return done


def off(done: dict[Any, Any], key: Any) -> float:
    """The largest deviation of an update from that under ddp."""
    module, _, precision, *_ = key
    cell, base = done[key], done[module, "ddp", precision]
    moved = [name for name in cell["start"] if not torch.equal(cell["start"][name], base["final"][name])]
    assert len(moved) >= len(cell["start"]) - 1, module
    parts = ({name: weights[name] for name in moved} for weights in (cell["start"], cell["final"], base["final"]))
    return max(update_deviation(*parts).values())
