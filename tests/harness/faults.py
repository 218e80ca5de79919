"""A module and its data with a fault that is made on purpose, which a verdict must find. Without one they are well."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SLOW = 0.06  # seconds


def on_rank_1() -> bool:
    return os.environ["RANK"] == "1"


class Cell:
    """Garbage that refers to itself."""

    def __init__(self) -> None:
        self.self = [self]


class Faulty(LightningModule):
    """A step takes some 30 ms on a CPU. `fault`: host, compute, leak, garbage, "device leak", retries, or none."""

    def __init__(self, fault: str = "", width: int = 512, rows: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.fault, self.kept = fault, []  # type: ignore[var-annotated]
        self.rows, self.width = rows, width
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch.new_ones(self.rows, self.width) * batch.mean()
        if self.fault == "host" and on_rank_1():
            time.sleep(SLOW)
        if self.fault == "compute" and on_rank_1():
            self._compute_more(x)
        if self.fault == "leak" and on_rank_1():
            self.kept.append(torch.ones(2**21))  # 8 MiB
        if self.fault == "device leak":
            self.kept.append(x.new_ones(2**25))  # 128 MiB
        if self.fault == "retries" and batch_idx > 2:
            # The second block is larger than the cached first one, and fits nowhere beside it
            size = int(0.55 * torch.cuda.mem_get_info()[1])
            for more in (0, 2**27):
                torch.empty(size + more, dtype=torch.uint8, device=self.device)
            torch.cuda.empty_cache()  # else other tensors would be put into that block, and hold it
        if self.fault == "garbage":
            for _ in range(30_000):
                Cell()
        out: Tensor = self.layers(x)
        return out.pow(2).mean()

    def _compute_more(self, x: Tensor) -> None:
        if x.device.type != "cpu":
            for _ in range(4 * len(self.layers)):
                torch.mm(x, x.T)
            return
        end = time.thread_time() + SLOW
        while time.thread_time() < end:
            torch.mm(x, x.T)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.001, fused=True)


class Rows(Dataset[Tensor]):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.ones(4)


class FaultyData(LightningDataModule):
    """Samples that come late to every rank (`data`), or to rank 1 alone (`data_of_one`)."""

    def __init__(self, fault: str = "", batch_size: int = 1) -> None:
        super().__init__()
        self.fault, self.batch_size = fault, batch_size

    def train_dataloader(self) -> DataLoader[Tensor]:
        is_late = self.fault == "data" or (self.fault == "data_of_one" and on_rank_1())
        return DataLoader(Rows(SLOW if is_late else 0.0), batch_size=self.batch_size)
