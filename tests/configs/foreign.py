"""What a user might bring: modules and data that know nothing of shardwise."""

from os import system as shell  # noqa: F401 # by another name
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Bare(LightningModule):
    """Without an optimizer of its own."""

    def __init__(self, width: int = 4, name: str | None = None, scale: float = 1.0, **options: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 1)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.layer(batch[0]).mean()


class Own(Bare):
    """With one."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    @classmethod
    def of_width(cls, *, width: int, **options: Any) -> "Own":
        return cls(width, **options)


class NoSuper(Own):
    def __init__(self) -> None:
        self.width = 3


class NoSuperData(LightningDataModule):
    def __init__(self) -> None:
        self.width = 3


class WithLoaders(Own):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(64, 4)), 2)


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(64, 4)), self.batch_size)


class WithoutLoader(LightningDataModule):
    def __init__(self, num_workers: int = 0) -> None:
        super().__init__()


def make_bare(width: int) -> Bare:
    return Bare(width)


number = 3
