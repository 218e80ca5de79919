"""A module that knows nothing of this repository: batch norm, a buffer drawn in its constructor, its own optimizer."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class Foreign(LightningModule):
    def __init__(self, width: int = 12, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.stem = nn.Linear(5, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(3)))
        self.head = nn.Linear(width, 3)
        self.register_buffer("shift", torch.randn(5))  # drawn by the constructor: must survive
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.area = torchmetrics.classification.MulticlassAUROC(3, thresholds=None)  # keeps every prediction

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.stem(x + self.shift)))
        return out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.area.update(logits, batch[1])
        self.log("validation/area", self.area)
        self.log("validation/accuracy", self.accuracy)
        loss = nn.functional.cross_entropy(logits.double(), batch[1])
        self.log("validation/loss", loss, sync_dist=True, batch_size=len(batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Points(LightningDataModule):
    def __init__(self, batch_size: int, validation_samples: int = 13, validation_batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.validation_samples, self.validation_batch_size = validation_samples, validation_batch_size

    def _points(self, count: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(count, 5, generator=generator)
        return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._points(70, 0), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._points(self.validation_samples, 1), batch_size=self.validation_batch_size)
