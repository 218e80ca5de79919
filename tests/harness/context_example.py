"""The example of recipes/README.md for divided sequences, in a module of somebody's own."""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from shardwise.config.compose import compose
from shardwise.plan import Host
from shardwise.plan.resolve import make_plan
from tests.harness.cells import fit
from tests.harness.pipelines import SGD, SIZE, stack_argv

PAGE = Path(__file__).parents[2] / "recipes" / "README.md"
SAID: dict[str, Any] = {"nn": nn, "torch": torch}
exec(re.search(r"## Divided sequences.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1], SAID)  # type: ignore[index]


class Attention(SAID["Attention"]):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.kernel = 4, "sdpa"
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), Attention()

    def forward(self, x: Tensor, layout: Any) -> Tensor:
        return x + self.attention(self.norm(x), layout)  # type: ignore[no-any-return]


class Decoder(SAID["Decoder"]):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.kernel = 4, "sdpa"
        self.embedding, self.position_embedding = nn.Embedding(61, 8), nn.Embedding(16, 8)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(3)), nn.LayerNorm(8)


class Example(LightningModule):
    sequence_tensors = ("tokens", "targets")

    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.head = Decoder(), nn.Linear(8, 61)

    def loss_weight(self, batch: Any) -> Tensor:
        return (batch["targets"] != -100).sum()  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.decoder(batch["tokens"]))
        total = nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
        return total / self.loss_weight(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.3)


def run(folder: Path, ranks: int, words: list[str]) -> list[float]:
    """In each rank: the losses of three steps, on rank 0."""
    stack = stack_argv(folder, f"{__name__}.Example", "tests.harness.cells.MaskedTokens")
    argv = [word for word in stack if word not in [*SIZE, *SGD]]
    argv += ["+data.batch_size=2", "precision=fp64", "max_steps=3", "log_every_n_steps=1", f"devices={ranks}", *words]
    (folder / "run").mkdir(parents=True, exist_ok=True)
    fit(make_plan(compose(argv).jobs[0].config, Host(cuda_devices=0)))
    if os.environ["RANK"] != "0":
        return []
    return [float(row["train/loss"]) for row in csv.DictReader((folder / "run" / "metrics.csv").open())]
