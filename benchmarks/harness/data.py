"""What is fed to the contenders: batches in memory, so that no contender waits for its data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from shardwise.plan import Plan

SAMPLES = 1 << 17  # no epoch ends within a run
# In place of the recipe's data, whose arguments these data do not take; data._target_= says which
NO_CORPUS = ["data=custom", "data.batch_size=${micro_batch_size}"]
# Sequences of 8,192 random tokens, and nothing besides training
RANDOM_TOKENS = [
    "data._target_=benchmarks.harness.data.RandomTokens", *NO_CORPUS, "data.sequence_length=8192",
    "+data.vocab_size=${model.vocab_size}", "module.sample_tokens=0", "checkpoint=none", "schedule=none",
    "validate_every_n_steps=1000000",
]  # fmt: skip


class OneBatch(Dataset[Any]):
    """One batch, which is handed out whole whatever is asked for. Calls `tick` whenever it is."""

    def __init__(self, batch: Any, tick: Callable[[], None] | None = None) -> None:
        self.batch, self.tick = batch, tick

    def __len__(self) -> int:
        return SAMPLES

    def __getitems__(self, indices: list[int]) -> Any:
        if self.tick is not None:
            self.tick()
        return self.batch


class Held(LightningDataModule):
    """`OneBatch` for a Trainer: no workers and no collation."""

    def __init__(self, batch: Any, batch_size: int, tick: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.dataset, self.batch_size = OneBatch(batch, tick), batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size=self.batch_size, shuffle=True, collate_fn=whole)


class RandomTokens(LightningDataModule):
    """Sequences of random tokens, other ones in each batch."""

    def __init__(self, batch_size: int, sequence_length: int, vocab_size: int) -> None:
        super().__init__()
        self.batch_size, self.sequence_length, self.vocab_size = batch_size, sequence_length, vocab_size

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader()

    def batches_of(self, rank: int, ranks: int) -> DataLoader[Any]:
        """Those of one of the ranks, for whoever has no sampler of its own."""
        return self._loader(sampler=range(rank, SAMPLES, ranks))

    def _loader(self, **options: Any) -> DataLoader[Any]:
        data, pinned = _Sequences(self.sequence_length, self.vocab_size), torch.cuda.is_available()
        return DataLoader(data, batch_size=self.batch_size, pin_memory=pinned, **options)


class _Sequences(Dataset[dict[str, Tensor]]):
    def __init__(self, length: int, vocab_size: int) -> None:
        self.length, self.vocab_size = length, vocab_size

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        row = torch.randint(0, self.vocab_size, (self.length + 1,), generator=generator)
        return {"tokens": row[:-1], "targets": row[1:]}


def whole(batch: Any) -> Any:
    return batch


def batch_of_tokens(plan: Plan) -> dict[str, Tensor]:
    """One micro-batch of random tokens for the language model of a Plan."""
    length, vocabulary = plan.data["sequence_length"], plan.module["model"]["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (plan.micro_batch_size, length + 1), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def batch_of_images(plan: Plan, device: torch.device) -> dict[str, Tensor]:
    """One micro-batch of random images for the image recipe of a Plan, on the device."""
    data, size = plan.data, plan.data["image_size"]
    generator = torch.Generator().manual_seed(0)
    shape = (plan.micro_batch_size, data["channels"], size, size)
    return {
        "image": torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device),
        "label": torch.randint(0, data["num_classes"], shape[:1], generator=generator).to(device),
        "index": torch.arange(shape[0]).to(device),
    }


def pinned(batch: Any, device: torch.device) -> Any:
    """The batch in memory from which a GPU copies while the host goes on."""
    if device.type != "cuda":
        return batch
    return (
        {name: tensor.pin_memory() for name, tensor in batch.items()} if isinstance(batch, dict) else batch.pin_memory()
    )


def moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, dict):
        return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    return batch.to(device, non_blocking=True)
