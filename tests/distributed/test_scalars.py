"""Parameters without a dimension and parameters without elements train, are clipped, saved and resumed as any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness.anybodys_module import RANKS
from tests.harness.processes import spawn
from tests.harness.scalars import BOUNDS, CELLS, RESUMED, off, run


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return spawn(RANKS, run, tmp_path_factory.mktemp("scalars"))


def test_every_strategy_trains_them_with_the_same_numbers(done: list[dict[Any, Any]]) -> None:
    for key in CELLS:
        assert off(done[0], key, ("ddp", key[1])) <= BOUNDS[key[1]], key
        assert done[0][key]["norms"] == pytest.approx(done[0]["ddp", key[1]]["norms"], rel=BOUNDS[key[1]]), key
        for name, weight in done[0][key]["final"].items():
            assert torch.equal(weight, done[1][key]["final"][name]), f"{key}: the ranks' copies of {name} differ"


def test_a_checkpoint_of_them_goes_on_under_another_strategy(done: list[dict[Any, Any]]) -> None:
    for strategy, source in RESUMED:
        assert off(done[0], ("resumed", strategy, source), ("ddp", "fp32")) <= BOUNDS["fp32"], (strategy, source)


def test_parameters_without_elements_train_or_are_refused_by_name(done: list[dict[Any, Any]]) -> None:
    assert done[0]["hollow", "fsdp"] == done[0]["hollow", "zero2"] == "done"
    assert done[0]["hollow", "zero3"].startswith("Hollow has parameters without elements (nowhere, layers.0.nothing)")
