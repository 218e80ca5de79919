"""A language model with dropout and masked tokens that goes wrong at a marked sample, on one of the ranks that divide
its layers or sequences."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from recipes.language_modeling.model import FeedForward, Transformer
from recipes.language_modeling.module import LanguageModel
from shardwise.nn.linear_cross_entropy import IGNORE
from shardwise.plan import Plan
from tests.harness.cells import cell_plan, masked_tokens
from tests.harness.divided import SIZES

MARK = 60  # the token of all positions of a marked sample
BATCH = 8
WORDS = {
    "tensor": ["strategy=fsdp", "strategy.tensor_parallel_size=2"],
    "context by keys": ["strategy=fsdp", "strategy.context_parallel_size=2", "strategy.context_parallel_method=keys"],
    "context by heads": ["strategy=fsdp", "strategy.context_parallel_size=2", "strategy.context_parallel_method=heads"],
}


class Dropping(FeedForward):
    """Drops at its end, where each tensor rank has its own part of the sequence."""

    def __init__(self, feed_forward: FeedForward) -> None:
        nn.Module.__init__(self)
        self.w1, self.w3, self.w2 = feed_forward.w1, feed_forward.w3, feed_forward.w2
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.drop(super().forward(x))
        return dropped


class Marked(LanguageModel):
    """`fault`: what a marked sample does. A gradient that is not a number is of one rank's part of the head.

    `dropout`: its layers drop, and its step hides tokens and counts targets over the epoch.
    """

    def __init__(self, model: Transformer, sample_tokens: int = 0, fault: str = "", dropout: bool = False) -> None:
        super().__init__(model, sample_tokens=sample_tokens)
        self.fault, self.hides = fault, dropout
        for block in model.blocks if dropout else ():
            block.feed_forward = Dropping(block.feed_forward)  # type: ignore[arg-type]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.hides:
            tokens = batch["tokens"]
            batch = {**batch, "tokens": torch.where(torch.rand(tokens.shape) < 0.1, 0, tokens)}
            targets = (batch["targets"] != IGNORE).sum().float()
            self.log("own/targets", targets, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        loss = super().training_step(batch, batch_idx)
        if not self.fault or not (batch["tokens"] == MARK).all(1).any():
            return loss
        if self.fault == "spike":
            return loss * 900
        if self.fault == "loss":
            return loss + math.inf
        weight: Any = self.model.head.weight
        return loss + ((weight - weight.detach()).abs().sqrt().sum() if self.global_rank == 1 else 0.0)


class MarkedTokens(LightningDataModule):
    """In order; sample `at` is marked."""

    def __init__(self, batch_size: int, at: int = 2 * BATCH + 5, samples: int = 80) -> None:
        super().__init__()
        self.batch_size, self.at, self.samples = batch_size, at, samples

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        rows = masked_tokens(self.samples)
        rows[self.at] = {"tokens": torch.full((16,), MARK), "targets": rows[self.at]["targets"]}
        return DataLoader(rows, batch_size=self.batch_size, shuffle=False)  # type: ignore[arg-type]


def marked_plan(folder: Path, layout: str, *words: str) -> Plan:
    plan = cell_plan(
        folder, 2, *WORDS[layout], *(f"model.{name}={size}" for name, size in SIZES.items()), "schedule=none",
        "module._target_=tests.harness.marked.Marked", "~module.sample_prompt",
        "data._target_=tests.harness.marked.MarkedTokens",
        f"global_batch_size={BATCH}", "micro_batch_size=4", "optimizer=sgd", "optimizer.lr=0.1", *words,
    )  # fmt: skip
    (folder / "plan.json").write_text(plan.to_json())  # the launcher does
    return plan
