"""lightning.pytorch.demos, on data that is made here where they would download."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.demos import LightningLSTM, LightningTransformer, WikiText2
from lightning.pytorch.demos.boring_classes import Net
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset


def write_wikitext(folder: Path) -> None:
    """Where `WikiText2(download=True)` finds it, started in `folder`."""
    words = [f"w{n}" for n in range(20)]
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "data" / "wikitext-2.txt").write_text(
        "\n".join(" ".join(random.Random(n).choices(words, k=12)) for n in range(170))
    )


def write_mnist(folder: Path) -> None:
    """Where MNISTDataModule finds it with PL_USE_MOCKED_MNIST=1."""
    draw = torch.Generator().manual_seed(0)
    at = folder / "data" / "MNIST" / "complete"
    at.mkdir(parents=True, exist_ok=True)
    for name in ("training.pt", "test.pt"):
        images = torch.randint(0, 2, (40, 28, 28), generator=draw, dtype=torch.uint8)
        torch.save((images, torch.randint(0, 10, (40,), generator=draw)), at / name)


def without_dropout(module: LightningModule) -> LightningModule:
    """These demos have no argument for it."""
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
        elif isinstance(layer, (nn.MultiheadAttention, nn.LSTM)):
            layer.dropout = 0.0
    return module


def transformer() -> LightningModule:
    return without_dropout(LightningTransformer(vocab_size=32))


def lstm() -> LightningModule:
    return without_dropout(LightningLSTM(vocab_size=32))


class Texts(LightningDataModule):
    """The demos' text for several samples a batch. `samples`: how many, since the LSTM forgets at an epoch's end."""

    def __init__(self, batch_size: int, samples: int) -> None:
        super().__init__()
        self.batch_size, self.samples = batch_size, samples

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Subset(WikiText2(), range(self.samples)), batch_size=self.batch_size)


class Digits(LightningModule):
    """The demos' network for MNIST, which they leave to the reader to wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        without_dropout(self)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.nll_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)
