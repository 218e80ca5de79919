"""Every experiment of conf/ runs a few steps, shrunk to what two cores can do, under its own strategy and precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardwise.config.paths import CONF
from shardwise.data.tokens import write_token_shards
from shardwise.run_dir.files import read_rows
from tests.harness.commands import check, run

SMALL = [
    "model.vocab_size=256", "model.dim=32", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=1",
    "model.ffn_dim=64", "model.max_seq_len=32", "data.sequence_length=32", "data.num_workers=0", "devices=2",
    "accelerator=cpu", "micro_batch_size=1", "global_batch_size=4", "max_steps=3", "validate_every_n_steps=3",
    "max_validation_batches=1", "log_every_n_steps=1",
]  # fmt: skip


@pytest.mark.parametrize("experiment", sorted(p.stem for p in (CONF / "experiment").glob("*.yaml") if p.stem != "none"))
def test_an_experiment_runs(tmp_path: Path, experiment: str) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, 2000)
    write_token_shards(tmp_path / "data", {s: [tokens] for s in ("train", "validation")}, vocab_size=256)
    words = [f"experiment={experiment}", *SMALL, "data=token_shards", f"data.directory={tmp_path / 'data'}", "name=run"]
    check(run(tmp_path, *words))
    rows = read_rows(tmp_path / "runs" / "run" / "metrics.csv")
    assert [row["step"] for row in rows if row["train/loss"]] == ["1", "2", "3"]
    assert rows[-1]["validation/loss"]
