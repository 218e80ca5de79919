"""One small model in which everything comes together that a strategy could get wrong, and its data."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

VOCABULARY, WIDTH, LENGTH, IGNORE = 23, 10, 12, -100
BATCH = 16  # rows of a global batch


class Detour(nn.Module):
    """A weight that only some rows take: `taken` [B] of bool."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, taken: Tensor) -> Tensor:
        return torch.where(taken[:, None, None], x + self.linear(x), x) if taken.any() else x


class Block(nn.Module):
    """Seven and ten divide by neither two nor four ranks; the last bias is frozen."""

    def __init__(self, occasional: bool) -> None:
        super().__init__()
        self.norm, self.down, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.up.bias.requires_grad_(False)
        self.lone = Detour() if occasional else None

    def forward(self, x: Tensor, lone: Tensor) -> Tensor:
        x = x + self.up(torch.tanh(self.down(self.norm(x))))
        return x if self.lone is None else self.lone(x, lone)


class Network(nn.Module):
    """A head tied to the embedding, a frozen layer, and, where `occasional`, weights that not every step needs.

    `lone` (in every block) takes part on rank 0 of two; `rare` (in none) in one global batch out of three.
    """

    def __init__(self, occasional: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(occasional) for _ in range(3))
        self.rare = Detour() if occasional else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)  # the same in fp64
                parameter.copy_(drawn * 0.3 + (1.0 if name.endswith("norm.weight") else 0.0))

    def loss_sum(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The summed loss and the number of valid tokens that it sums over."""
        x = self.fixed(self.embedding(batch["tokens"])) + self.embedding(batch["tokens"])
        for block in self.blocks:
            x = block(x, batch["lone"])
        x = x if self.rare is None else self.rare(x, batch["rare"])
        targets = batch["targets"].flatten()
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets, ignore_index=IGNORE, reduction="sum")
        return loss, (targets != IGNORE).sum()

    forward = loss_sum


class Everything(LightningModule):
    """The network as a recipe's module: the mean loss of a micro-batch, and how many tokens it is a mean of."""

    def __init__(self, occasional: bool = True) -> None:
        super().__init__()
        self.network = Network(occasional)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        total, count = self.network.loss_sum(batch)
        return total / count

    def loss_weight(self, batch: dict[str, Tensor]) -> int:
        return int((batch["targets"] != IGNORE).sum())


def rows(count: int = 50) -> list[dict[str, Tensor]]:
    """Sequences whose share of valid targets differs widely, so that a mean of means is wrong."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=generator)
        targets = tokens[1:].clone()
        targets[: i * 5 % LENGTH] = IGNORE
        batch, row = divmod(i, BATCH)
        # On two ranks rows 0, 1, 4 and 5 are rank 0's, with one micro-batch a step and with four.
        lone, rare = torch.tensor(row in (0, 1, 4, 5)), torch.tensor(batch == 1 and row in (0, 7))
        made.append({"tokens": tokens[:-1], "targets": targets, "lone": lone, "rare": rare})
    return made


class Rows(LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(rows(), batch_size=self.batch_size)  # type: ignore[arg-type]
