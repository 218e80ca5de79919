"""A mixture of corpora in real runs: its order after a resume, its validation sets, and data that has changed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shardwise.data.tokens import write_token_shards
from tests.harness.commands import RECIPE, check, metrics, run

VALIDATION = {"books": 3, "web": 8}  # sequences
MIXTURE = [word for word in RECIPE if not word.startswith(("data.corpus=", "data.directory=", "data.max_"))] + [
    "data=mixture", "data.corpora={books: {directory: books, weight: 7}, web: {directory: web, weight: 3}}",
    "checkpoint.monitor=validation/books/loss", "validate_every_n_steps=4", "data.num_workers=0",
]  # fmt: skip
LOSSES = [f"validation{name}/loss" for name in ("", "/books", "/web")]


def write_corpus(folder: Path, name: str, seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(97, 123, 32 * 50 + 1)
    splits = {"train": [tokens[: 32 * 12 + 1] if name == "books" else tokens],
              "validation": [tokens[: 32 * VALIDATION[name] + 1]]}  # fmt: skip
    write_token_shards(folder / name, splits, vocab_size=256)


def test_a_mixture_goes_on_elsewhere_in_its_order(tmp_path: Path) -> None:
    for seed, name in enumerate(VALIDATION):
        write_corpus(tmp_path, name, seed)
    check(run(tmp_path, *MIXTURE, "name=whole", "max_steps=8"))
    first = check(run(tmp_path, *MIXTURE, "name=parts", "max_steps=4", "devices=2"))
    assert "mixture: books 70.0% of 12 sequences, read 1.9 times; web 30.0% of 50 sequences, read 0.19" in first.stdout

    other = ["micro_batch_size=4", "data.num_workers=1", "max_steps=8", "name=parts", "resume=auto"]
    weights = "data.corpora={books: {directory: books, weight: 6}, web: {directory: web, weight: 3}}"
    refused = check(run(tmp_path, *MIXTURE, *other, weights), 2)
    assert "data.corpora.books.weight 7 → 6: the run would not see the samples that it was to see" in refused.stderr

    check(run(tmp_path, *MIXTURE, *other))
    columns = ["train/loss", "data/books/epochs", "data/web/epochs"]
    whole, parts = (metrics(tmp_path / "runs" / name, *columns) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() == set(range(1, 9))
    for step in whole:
        assert parts[step] == pytest.approx(whole[step], rel=1e-4), step
    assert whole[8][1] * 12 + whole[8][2] * 50 == pytest.approx(8 * 8)  # every sample is of one of them

    for name in ("whole", "parts"):
        for step, (all_sets, books, web) in metrics(tmp_path / "runs" / name, *LOSSES).items():
            assert all_sets == pytest.approx((3 * books + 8 * web) / 11, rel=1e-6) and books != web, step
    best = json.loads((tmp_path / "runs/parts/summary.json").read_text())["best"]
    assert best["validation/books/loss"] == pytest.approx(metrics(tmp_path / "runs/parts", LOSSES[1])[8][0])

    # The same folder holds other tokens now, which no option tells
    (tmp_path / "web").rename(tmp_path / "before")
    write_corpus(tmp_path, "web", seed=9)
    more = [*MIXTURE, "name=parts", "resume=auto", "max_steps=9"]
    refused = check(run(tmp_path, *more), 2)
    [line] = [line for line in refused.stderr.splitlines() if "has changed since the checkpoint" in line]
    assert (
        "web was sha256 " in line and "books" not in line and "give the data as it was, or resume_allow=[data]" in line
    )
    check(run(tmp_path, *more, "resume_allow=[data]"))
