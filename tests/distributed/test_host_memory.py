"""No rank ever holds the whole model on its host, neither while it is initialised nor while it is read from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.plan import Plan
from tests.harness.cells import MaskedTokens, cell_plan
from tests.harness.host_memory import measure_setup, write_random_weights
from tests.harness.processes import spawn

RANKS = 2
SLACK = 0.2  # of the model: a unit, or a parameter, on its way
SIZE = ["model.dim=512", "model.n_layers=16", "model.n_heads=8", "model.n_kv_heads=2", "model.ffn_dim=1536",
        "model.tie_embeddings=false"]  # fmt: skip
STRATEGIES = ["fsdp", "zero2", "zero3"]


def plan_of(folder: Path, *words: str) -> Plan:
    always = ["precision=bf16", "global_batch_size=4", "micro_batch_size=2", "max_steps=1", "checkpoint=none"]
    return cell_plan(folder, RANKS, *always, *words)


def measure_all(folder: Path, weights: Path) -> dict[str, Any]:
    """In each rank. A small model comes first, since what is imported on the way takes memory, too."""
    found = {}
    for strategy in STRATEGIES:
        word = f"strategy={strategy}"
        measure_setup(plan_of(folder / f"{strategy}-small", word), MaskedTokens(2))
        plan = plan_of(folder / strategy, word, *SIZE, f"init_from={weights}")
        found[strategy] = measure_setup(plan, MaskedTokens(2))
    return found


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("memory")
    write_random_weights(plan_of(folder / "written", "strategy=ddp", *SIZE), folder / "weights", 30e6)
    assert len(list((folder / "weights").glob("*.safetensors"))) > 2
    return spawn(RANKS, measure_all, folder, folder / "weights")


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_a_rank_makes_its_shard_and_a_unit_at_a_time(peaks: Any, strategy: str) -> None:
    """Under ZeRO-3 a shard is in fp32 and in bf16."""
    share = {"fsdp": 1.0, "zero3": 1.5}[strategy] / RANKS
    for rank in peaks:
        found = rank[strategy]
        assert 0.8 * share * found["whole"] < found["made"]["own"] < (share + SLACK) * found["whole"], found


def test_zero2_shares_the_values_that_masters_begin_with(peaks: Any) -> None:
    """Every rank has the module in bf16, and its share of the values in fp32."""
    for rank in peaks:
        found = rank["zero2"]
        assert found["made"]["held"] < (0.5 + 1 / RANKS + SLACK) * found["whole"], found


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_a_rank_reads_its_part_of_the_files(peaks: Any, strategy: str) -> None:
    """It reads into its shards, and maps the pages that these are in: the files are in bf16."""
    for rank in peaks:
        found = rank[strategy]
        assert found["read"]["own"] < SLACK * found["whole"], found
        assert found["read"]["mapped"] < (0.5 / RANKS + SLACK) * found["whole"], found
