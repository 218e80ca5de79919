"""`loss=` changes memory and speed and nothing else: under every strategy, with and without all logits at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.language_modeling.model import Transformer
from tests.harness.cells import cell_plan, fit, masked_tokens
from tests.harness.processes import spawn
from tests.harness.reference import plain_loop, update_deviation

STEPS, BATCH = 3, 8
SIZES = {"vocab_size": 61, "dim": 24, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 41, "max_seq_len": 16}
WORDS = [
    "optimizer=sgd", "optimizer.lr=0.3", "optimizer.momentum=0.9", "optimizer.weight_decay=0.01", "schedule=none",
    "gradient_clip_val=null", f"max_steps={STEPS}", f"global_batch_size={BATCH}", "micro_batch_size=2",
    f"validate_every_n_steps={STEPS}", "checkpoint=none", "model.n_layers=2",
]  # fmt: skip
# Strategy, precision and whether the head has the embedding's weight: two micro-batches a step, which weigh differently
CELLS = [
    ("ddp", "fp64", True), ("fsdp", "fp64", True), ("fsdp", "fp64", False),
    ("fsdp_hybrid strategy.shard_size=2", "fp64", True),
    ("zero1", "fp32", True), ("zero2", "fp32", True), ("zero3", "fp32", True), ("zero3", "fp32", False),
]  # fmt: skip
IN_16_BITS = [("ddp", "full"), ("ddp", "chunked"), ("fsdp", "chunked"), ("zero3", "chunked")]
BOUNDS = {"fp64": 1e-9, "fp32": 1e-4}


def run_cells(folder: Path) -> dict[Any, dict[str, Any]]:
    """In each rank. A chunk has 12 rows, and a micro-batch 32, so that the last chunk is shorter."""
    cells: dict[Any, dict[str, Any]] = {}
    for strategy, precision, tied in CELLS:
        words = [f"precision={precision}", f"model.tie_embeddings={str(tied).lower()}", "loss=chunked"]
        cells[strategy, precision, tied] = run_cell(folder / str(len(cells)), strategy, *words)
    for strategy, loss in IN_16_BITS:
        cells[strategy, loss] = run_cell(folder / str(len(cells)), strategy, "precision=bf16", f"loss={loss}")
    return cells


def run_cell(run_dir: Path, strategy: str, *words: str) -> dict[str, Any]:
    calls: list[int] = []

    def twelve(rows: int, vocabulary: int, logits: int) -> int:
        calls.append(rows)
        return 12

    with patch("shardwise.nn.linear_cross_entropy.rows_of_a_chunk", twelve):
        cell = fit(cell_plan(run_dir, 2, *WORDS, *f"strategy={strategy}".split(), *words))
    return cell | {"chunked": calls}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, Any]]:
    return spawn(2, run_cells, tmp_path_factory.mktemp("loss"))[0]


def loss_sum(model: Transformer, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits = model.head(model(batch["tokens"]))
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum"), (
        batch["targets"] >= 0
    ).sum()


@pytest.mark.parametrize(("strategy", "precision", "tied"), CELLS)
def test_chunks_train_as_the_plain_loop_does(cells: Any, strategy: str, precision: str, tied: bool) -> None:
    cell, dtype = cells[strategy, precision, tied], torch.float64 if precision == "fp64" else torch.float32
    model = Transformer(**SIZES, tie_embeddings=tied).to(dtype)  # type: ignore[arg-type]
    start = {name.removeprefix("model."): tensor for name, tensor in cell["start"].items()}
    missing = model.load_state_dict(start, strict=False)
    assert not missing.unexpected_keys and missing.missing_keys == (["head.weight"] if tied else [])
    assert cell["chunked"][: 2 * STEPS] == [32] * 2 * STEPS and len(cell["chunked"]) > 2 * STEPS  # validation too
    final, losses, norms = plain_loop(model, masked_tokens(50), loss_sum, "sgd", STEPS, BATCH, None)
    final = {f"model.{name}": tensor for name, tensor in final.items()}
    bound = BOUNDS[precision]
    assert max(update_deviation(cell["start"], cell["final"], final).values()) <= bound
    assert cell["losses"] == pytest.approx(losses, rel=bound)
    assert cell["norms"] == pytest.approx(norms, rel=bound)
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in cell["final"].items()}, strict=False)
    rows = masked_tokens(13, seed=1)
    with torch.no_grad():
        total, tokens = loss_sum(model, {key: torch.stack([row[key] for row in rows]) for key in rows[0]})
    assert cell["validation"]["validation/loss"] == pytest.approx(float(total / tokens), rel=bound)


def test_in_bf16_chunks_are_the_same_under_every_strategy(cells: Any) -> None:
    full = cells["ddp", "full"]
    assert not full["chunked"]
    for strategy, loss in IN_16_BITS[1:]:
        cell = cells[strategy, loss]
        assert cell["losses"][0] == pytest.approx(full["losses"][0], rel=1e-6), strategy
        assert cell["norms"][0] == pytest.approx(full["norms"][0], rel=2e-3), strategy
        assert cell["losses"] == pytest.approx(full["losses"], rel=1e-2), strategy
