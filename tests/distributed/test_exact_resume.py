"""Resumed as it was started, a run is bit for bit the one that was not interrupted: dropout, buckets, workers, EMA."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.cells import fit
from tests.harness.exact_resume import CELLS, STEPS, plan_for, run_all, unlike
from tests.harness.processes import spawn


@pytest.fixture(scope="module", params=list(CELLS))
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    ranks: int = request.param
    return ranks, spawn(ranks, run_all, tmp_path_factory.mktemp("exact"), ranks, CELLS[ranks])


def test_a_resumed_run_never_stopped(runs: Any) -> None:
    ranks, found = runs
    for name in CELLS[ranks]:
        straight = found[0][name]["straight"]
        assert len(straight["losses"]) == STEPS and straight["losses"][0] != straight["losses"][-1]
        assert [unlike(**rank[name]) for rank in found] == [[]] * ranks, name


def chosen(folder: Path) -> list[Any]:
    words = ("deterministic=true", "checkpoint=none")
    found: list[Any] = [torch.are_deterministic_algorithms_enabled()]
    fit(plan_for(folder, 1, 1, *words))
    return [*found, torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")]


def test_deterministic_reaches_torch(tmp_path: Path) -> None:
    assert spawn(1, chosen, tmp_path / "run") == [[False, True, ":4096:8"]]
