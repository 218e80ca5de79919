"""What is on a GPU when a step's activations are gone: weights, gradients and optimizer state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from shardwise.plan.parallel_costs import state_bytes_of_rank
from shardwise.plan.pipeline import decoder_of
from shardwise.plan.plan import Plan

STEP = 2  # the optimizer has its state since the first one
FILE = "state-of-rank-{}.json"


class StateMemory(Callback):
    """Writes how many bytes a rank's GPU has allocated just before the update of a step."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if trainer.global_step == STEP and torch.cuda.is_available():
            torch.cuda.synchronize()
            strategy: Any = trainer.strategy
            path = Path(strategy.plan.run_dir) / FILE.format(trainer.global_rank)
            path.write_text(json.dumps(torch.cuda.memory_allocated()))


def state_of(run: Path, plan: Plan) -> dict[str, list[float]]:
    """The bytes that each rank of a run had allocated, and those that a dry run states; nothing of a run on a CPU."""
    ranks = range(plan.topology.nodes * plan.topology.devices)
    files, decoder = [run / FILE.format(rank) for rank in ranks], decoder_of(plan)
    if decoder is None or not all(file.exists() for file in files):
        return {}
    by_position = state_bytes_of_rank(plan, decoder)
    return {
        "allocated": [json.loads(file.read_text()) for file in files],
        "stated": [by_position[plan.topology.pipeline_rank(rank)] for rank in ranks],
    }
