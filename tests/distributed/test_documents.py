"""Packed documents under strategies, compiled and recomputed: the same numbers, and integers that nobody casts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from shardwise.data.document_stream import IGNORE, collate_documents
from tests.harness.cells import cell_plan, fit
from tests.harness.processes import spawn

RUNS = {
    "ddp": [],
    "fsdp": ["strategy=fsdp", "activation_checkpointing=full"],
    "zero3": ["strategy=zero3"],
    "fsdp bf16": ["strategy=fsdp", "precision=bf16"],
    "ddp bf16": ["precision=bf16"],
    "compiled": ["strategy=fsdp", "compile=layer", "activation_checkpointing=full"],
    "compiled whole": ["compile=model"],
    "mixed up": ["data.mask=false"],
}


class PackedTokens(LightningDataModule):
    """Sequences of 16 tokens in documents of 4, 1, 7 and 4, another order of them in each."""

    def __init__(self, batch_size: int, mask: bool = True) -> None:
        super().__init__()
        self.batch_size, self.mask = batch_size, mask

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        collate = collate_documents if self.mask else None
        return DataLoader(packed_tokens(self.mask), batch_size=self.batch_size, collate_fn=collate)  # type: ignore[arg-type]


def packed_tokens(mask: bool) -> list[dict[str, Tensor]]:
    generator, rows = torch.Generator().manual_seed(0), []
    for i in range(16):
        tokens = torch.randint(0, 61, (17,), generator=generator)
        lengths = torch.tensor([4, 1, 7, 5]).roll(i)
        documents = torch.arange(4).repeat_interleave(lengths)
        row = {"tokens": tokens[:-1], "targets": tokens[1:].where(documents[1:] == documents[:-1], IGNORE)}
        rows.append(row | ({"documents": documents[:-1]} if mask else {}))
    return rows


def train_all(folder: Path) -> dict[str, Any]:
    words = ["data._target_=tests.distributed.test_documents.PackedTokens", "micro_batch_size=2", "global_batch_size=8",
             "max_steps=2"]  # fmt: skip
    return {name: fit(cell_plan(folder / name.replace(" ", "-"), 2, *words, *more)) for name, more in RUNS.items()}


def test_documents_are_kept_apart_under_every_strategy(tmp_path: Path) -> None:
    found = spawn(2, train_all, tmp_path)[0]
    for name in ("fsdp", "zero3", "compiled", "compiled whole"):
        assert found[name]["losses"] == pytest.approx(found["ddp"]["losses"], rel=1e-5), name
        assert found[name]["norms"] == pytest.approx(found["ddp"]["norms"], rel=1e-4), name
    for name in ("ddp bf16", "fsdp bf16"):
        assert found[name]["losses"] == pytest.approx(found["ddp"]["losses"], rel=1e-3), name
    assert found["mixed up"]["norms"] != pytest.approx(found["ddp"]["norms"], rel=1e-3)
