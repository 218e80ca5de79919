"""What the tests of context parallelism run: a small language model on parts of sequences, beside a plain loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from recipes.language_modeling.model import Transformer
from shardwise.data.document_stream import IGNORE, collate_documents
from shardwise.plan import Plan
from tests.harness.cells import cell_plan, fit
from tests.harness.reference import WEIGHT_DECAY, plain_loop, update_deviation

STEPS, BATCH, CLIP = 4, 8, 0.1
SIZES: dict[str, Any] = {"vocab_size": 61, "dim": 32, "n_layers": 2, "n_heads": 4, "ffn_dim": 41, "max_seq_len": 16,
                         "tie_embeddings": True}  # fmt: skip
BOUNDS = {"fp64": 1e-9, "fp32": 1e-4}
OPTIMIZERS = {"sgd": ["optimizer=sgd", "optimizer.lr=0.3"], "adamw": ["optimizer=adamw", "optimizer.lr=0.01"]}


class Sequences(LightningDataModule):
    """Sequences whose share of valid targets differs widely between samples and between parts of a sample."""

    def __init__(self, batch_size: int, length: int = 16, documents: bool = False) -> None:
        super().__init__()
        self.batch_size, self.length, self.documents = batch_size, length, documents

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        rows = sequences(3 * BATCH, self.length, self.documents)
        collate = collate_documents if self.documents else None
        return DataLoader(rows, batch_size=self.batch_size, collate_fn=collate)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(sequences(5, self.length, False, seed=1), batch_size=2)  # type: ignore[arg-type]


def sequences(samples: int, length: int, documents: bool, seed: int = 0) -> list[dict[str, Tensor]]:
    generator, rows = torch.Generator().manual_seed(seed), []
    for i in range(samples):
        tokens = torch.randint(0, SIZES["vocab_size"], (length + 1,), generator=generator)
        targets = tokens[1:].clone()
        targets[: i * 5 % length] = IGNORE  # of some samples all are in the last part
        row = {"tokens": tokens[:-1], "targets": targets}
        if documents:
            row["documents"] = torch.arange(4).repeat_interleave(torch.tensor([5, 1, 7, length - 13]).roll(i))
        rows.append(row)
    return rows


@dataclass(frozen=True)
class Case:
    context: int
    method: str  # heads or keys
    precision: str = "fp64"
    optimizer: str = "sgd"
    accumulate: int = 1
    clip: float | None = None
    length: int = 16
    documents: bool = False
    words: tuple[str, ...] = ()

    @property
    def key_heads(self) -> int:
        return self.context if self.method == "heads" else 1


def plan_of(case: Case, folder: Path, ranks: int, *words: str) -> Plan:
    data_ranks = ranks // case.context
    return cell_plan(
        folder, ranks, *(f"model.{name}={str(value).lower()}" for name, value in SIZES.items()),
        f"model.n_kv_heads={case.key_heads}", "data._target_=tests.harness.context.Sequences",
        f"+data.length={case.length}", f"+data.documents={str(case.documents).lower()}",
        "strategy=fsdp", f"strategy.context_parallel_size={case.context}",
        *([f"strategy.context_parallel_method={case.method}"] if case.context > 1 else []),
        f"precision={case.precision}", *OPTIMIZERS[case.optimizer], f"optimizer.weight_decay={WEIGHT_DECAY}",
        f"global_batch_size={BATCH}", f"micro_batch_size={BATCH // data_ranks // case.accumulate}",
        f"gradient_clip_val={'null' if case.clip is None else case.clip}", f"max_steps={STEPS}",
        f"validate_every_n_steps={STEPS}", "schedule=none", *case.words, *words,
    )  # fmt: skip


def run_cases(folder: Path, ranks: int, cases: list[Case]) -> list[dict[str, Any]]:
    """In each rank."""
    return [fit(plan_of(case, folder / str(i), ranks, "checkpoint=none")) for i, case in enumerate(cases)]


class Model(torch.nn.Module):
    """The plain version."""

    def __init__(self, case: Case, start: dict[str, Tensor]) -> None:
        super().__init__()
        dtype = {"fp64": torch.float64, "fp32": torch.float32}[case.precision]
        self.model = Transformer(**SIZES, n_kv_heads=case.key_heads).to(dtype)
        self.load_state_dict(start, strict=False)

    def loss_sum(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        hidden = self.model(batch["tokens"], documents=batch.get("documents"))
        logits = (hidden @ self.model.head.weight.T).flatten(0, 1)
        targets = batch["targets"].flatten()
        total = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
        return total, (targets != IGNORE).sum()


def deviations(case: Case, result: dict[str, Any]) -> dict[str, float]:
    """The largest relative deviations from the plain loop."""
    start = {name: tensor.clone() for name, tensor in result["start"].items()}
    model = Model(case, start)
    rows = sequences(3 * BATCH, case.length, case.documents)
    final, losses, norms = plain_loop(model, rows, Model.loss_sum, case.optimizer, STEPS, BATCH, case.clip)
    assert len(result["losses"]) == STEPS and set(final) == set(start)
    model.load_state_dict(final, strict=False)
    with torch.no_grad():
        rows = sequences(5, case.length, False, seed=1)
        sums = [model.loss_sum({key: value[None] for key, value in row.items()}) for row in rows]
    validation = float(sum(total for total, _ in sums) / sum(items for _, items in sums))
    return {
        "update": max(update_deviation(start, result["final"], final).values()),
        "loss": max(abs(a / b - 1) for a, b in zip(result["losses"], losses, strict=True)),
        "norm": max(abs(a / b - 1) for a, b in zip(result["norms"], norms, strict=True)),
        "validation": abs(result["validation"]["validation/loss"] / validation - 1),
    }
