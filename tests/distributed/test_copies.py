"""`strategy.symmetric_memory=true`: what FSDP2's units exchange by copies are the same bits as by collectives."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardwise.plan import Plan
from shardwise.strategies import fsdp_copies
from tests.harness.cells import cell_plan, fit
from tests.harness.parity import CLIP, Cell, plan_of
from tests.harness.processes import spawn
from tests.harness.shared_file import SharedFile

HALF = ["strategy=fsdp_hybrid", "strategy.shard_size=2"]
LANGUAGE = ["max_steps=4", "validate_every_n_steps=2", "checkpoint=none", "global_batch_size=8", "micro_batch_size=2"]
# Name → ranks, and the words of a language model; without words the module with everything
CELLS: dict[str, tuple[int, list[str]]] = {
    "everything, fp32": (2, []),
    "bf16, two micro-batches": (2, [*LANGUAGE, "strategy=fsdp", "precision=bf16"]),
    "stays gathered": (2, [*LANGUAGE, "strategy=fsdp", "precision=bf16", "strategy.reshard_after_forward=false"]),
    "recomputed, ahead": (
        2,
        [
            *LANGUAGE,
            "strategy=fsdp",
            "precision=bf16",
            "activation_checkpointing=full",
            "strategy.forward_prefetch_units=2",
            "strategy.backward_prefetch_units=2",
        ],
    ),
    "hybrid": (4, [*LANGUAGE, *HALF, "precision=bf16", "micro_batch_size=1"]),
    "four ranks, fp32": (4, [*LANGUAGE, "strategy=fsdp", "precision=fp32", "micro_batch_size=1"]),
}
OTHER_ORDER = "four ranks, fp32"  # copies add up in the order of the ranks, collectives in their own


def plan_for_cell(name: str, folder: Path) -> Plan:
    ranks, words = CELLS[name]
    if words:
        return cell_plan(folder, ranks, *words, "model.n_layers=3")
    return plan_of(Cell("fsdp", "fp32", "adamw", 2, CLIP, True), ranks, folder)


def by_copies(plan: Plan, name: str) -> Plan:
    folder = Path(plan.run_dir).with_name(name)
    folder.mkdir(exist_ok=True)
    return dataclasses.replace(
        plan, run_dir=str(folder), strategy=dataclasses.replace(plan.strategy, symmetric_memory=True)
    )


def train(folder: Path, ranks: int) -> dict[str, Any]:
    """In each rank: every cell as it is, and by copies."""
    found = {}
    with patch.object(fsdp_copies, "SymmetricBuffer", SharedFile):
        for number, name in enumerate(name for name, (n, _) in CELLS.items() if n == ranks):
            plan = plan_for_cell(name, folder / str(number))
            gathers = fsdp_copies._Gather.gather
            with patch.object(fsdp_copies._Gather, "gather", autospec=True, side_effect=gathers) as gathered:
                found[name] = [fit(plan), fit(by_copies(plan, f"{number}-copies"))]
            found[name][1]["gathered"] = gathered.call_count
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for ranks in (2, 4):
        found |= spawn(ranks, train, tmp_path_factory.mktemp(f"ranks{ranks}"), ranks)[0]
    return found


@pytest.mark.parametrize("name", [name for name in CELLS if name != OTHER_ORDER])
def test_the_bits_are_the_same(runs: dict[str, Any], name: str) -> None:
    usual, copied = runs[name]
    assert copied["gathered"] > 0
    assert copied["losses"] == usual["losses"] and copied["norms"] == usual["norms"]
    assert copied["validation"] == usual["validation"]
    different = [key for key, tensor in usual["final"].items() if not torch.equal(copied["final"][key], tensor)]
    assert not different


def test_sums_of_more_ranks_differ_by_their_order_alone(runs: dict[str, Any]) -> None:
    usual, copied = runs[OTHER_ORDER]
    assert copied["gathered"] > 0
    for what in ("losses", "norms", "validation"):
        assert copied[what] == pytest.approx(usual[what], rel=1e-5), what
    for key, tensor in usual["final"].items():
        torch.testing.assert_close(copied["final"][key], tensor, rtol=1e-4, atol=1e-5, msg=key)


def test_a_unit_that_stays_gathered_is_gathered_less_often(runs: dict[str, Any]) -> None:
    counts = {name: copied["gathered"] for name, (_, copied) in runs.items()}
    assert counts["bf16, two micro-batches"] > counts["stays gathered"]
