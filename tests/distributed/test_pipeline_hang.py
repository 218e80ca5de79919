"""A pipeline that stands still: the message says which stage did not go on, and at what, and who waits for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.commands import check, make_home, run
from tests.harness.patience import slowness

MODULE = """
import os, signal, time
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return torch.tanh(self.linear(x))

class Module(LightningModule):
    def __init__(self, rank, does):
        super().__init__()
        self.layers, self.odd, self.does = nn.Sequential(Layer(), Layer()), rank, does
    def training_step(self, batch, batch_idx):
        if self.global_rank == self.odd and self.trainer.global_step == 2 and batch_idx % 4 == 2:
            os.kill(os.getpid(), signal.SIGSTOP) if self.does == "stops" else time.sleep(1000)
        return self.layers(batch).square().mean()

class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(list(torch.ones(80, 4)), batch_size=2)
"""
WORDS = ["recipe=custom", "module._target_=still.Module", "data._target_=still.Data", "optimizer=sgd",
         "micro_batch_size=2", "global_batch_size=8", "max_steps=5", "checkpoint=none", "strategy=fsdp", "devices=2",
         "strategy.pipeline_parallel_size=2", "accelerator=cpu"]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = make_home(tmp_path_factory.mktemp("still"))
    (home / "still.py").write_text(MODULE)
    return home


@pytest.mark.parametrize(
    ("does", "rank", "absent", "waiting"),
    [
        # Rank 1 has the first stage, rank 0 the last. What rank 1 has sent may stay with it when it is stopped.
        ("stops", 1, "rank 1 did not answer: it is stopped, or gone",
         "stage 2 of 2, forward of micro-batch [23], waiting for stage 1, in take \\(engine.py:"),
        ("waits", 0, "rank 0 did not arrive: it is at step 3, stage 2 of 2, forward of micro-batch 3, in training_step",
         "stage 1 of 2, backward of micro-batch 3, waiting for stage 2, in take \\(engine.py:"),
    ],
)  # fmt: skip
def test_stage_and_action_are_named(home: Path, does: str, rank: int, absent: str, waiting: str) -> None:
    seconds = round(12 * slowness())
    words = [f"+module.rank={rank}", f"+module.does={does}", f"name={does}", f"strategy.timeout_minutes={seconds / 60}"]
    done = check(run(home, *WORDS, *words), 6)
    assert done.stderr.startswith(f"error: no progress for {seconds} s (strategy.timeout_minutes): {absent}")
    assert re.search(f"; the others are at step 3, {waiting}", done.stderr) and done.stderr.count("\n") == 1
