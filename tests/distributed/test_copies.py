"""`strategy.symmetric_memory`: what FSDP2's units exchange by copies are the same bits as by collectives.

Where one rank cannot share its memory, `null` has all ranks use collectives, and `true` ends all of them.
"""

from __future__ import annotations

import dataclasses
import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.strategies import fsdp_symmetric_memory
from tests.harness.cells import cell_plan, fit
from tests.harness.parity import CLIP, Cell, plan_of
from tests.harness.processes import spawn
from tests.harness.shared_file import NOTICE, REFUSAL, RefusedOnRankOne, SharedFile

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


def by_copies(plan: Plan, name: str, asked: bool | None = True) -> Plan:
    folder = Path(plan.run_dir).with_name(name)
    folder.mkdir(exist_ok=True)
    return dataclasses.replace(
        plan, run_dir=str(folder), strategy=dataclasses.replace(plan.strategy, symmetric_memory=asked)
    )


def train(folder: Path, ranks: int) -> dict[str, Any]:
    """In each rank: every cell as it is, and by copies."""
    found = {}
    with patch.object(fsdp_symmetric_memory, "SymmetricBuffer", SharedFile):
        for number, name in enumerate(name for name, (n, _) in CELLS.items() if n == ranks):
            plan = plan_for_cell(name, folder / str(number))
            gathers = fsdp_symmetric_memory._Gather.gather
            with patch.object(fsdp_symmetric_memory._Gather, "gather", autospec=True, side_effect=gathers) as gathered:
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


def try_both(folder: Path, name: str) -> dict[str, Any]:
    """In each rank: the cell as it is, with null where ranks can share memory, and null and true where one cannot."""
    plan, found = plan_for_cell(name, folder / "usual"), {}
    gathers = fsdp_symmetric_memory._Gather.gather
    for cell, asked, buffer in (
        ("usual", False, SharedFile),
        ("can", None, SharedFile),
        ("null", None, RefusedOnRankOne),
    ):
        with (
            redirect_stdout(io.StringIO()) as out,
            patch.object(fsdp_symmetric_memory, "SymmetricBuffer", buffer),
            patch.object(fsdp_symmetric_memory._Gather, "gather", autospec=True, side_effect=gathers) as gathered,
        ):
            found[cell] = fit(by_copies(plan, cell, asked))
        said = [line for line in out.getvalue().splitlines() if "symmetric_memory" in line]
        found[cell] |= {"gathered": gathered.call_count, "said": said}
    with (
        patch.object(fsdp_symmetric_memory, "SymmetricBuffer", RefusedOnRankOne),
        pytest.raises(ConfigError) as refused,
    ):
        fit(by_copies(plan, "true"))
    return found | {"true": str(refused.value)}


@pytest.mark.parametrize("name", ["bf16, two micro-batches", "hybrid"])
def test_one_rank_that_cannot_share_its_memory_decides_for_all(tmp_path: Path, name: str) -> None:
    """In `hybrid` it is in one of two groups that would copy."""
    for rank, found in enumerate(spawn(CELLS[name][0], try_both, tmp_path, name)):
        usual, null = found["usual"], found["null"]
        assert [found[cell]["gathered"] > 0 for cell in ("usual", "can", "null")] == [False, True, False]
        assert [found[cell]["said"] for cell in ("usual", "can")] == [[], []]
        assert null["said"] == ([] if rank else [NOTICE])
        assert null["losses"] == usual["losses"] and null["norms"] == usual["norms"]
        assert all(torch.equal(null["final"][key], tensor) for key, tensor in usual["final"].items())
        assert found["true"] == REFUSAL
