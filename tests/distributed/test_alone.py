"""`fsdp` on ranks that share their parameters with no other: the bits are those of FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness.alone import CELLS, train
from tests.harness.processes import spawn


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for ranks in (1, 2):
        found |= spawn(ranks, train, tmp_path_factory.mktemp(f"ranks{ranks}"), ranks)[0]
    return found


ROUNDS = "tensor, bf16"  # a compiled layer does not round to bf16 what it casts back to fp32 at once


@pytest.mark.parametrize("name", [name for name in CELLS if name != ROUNDS])
def test_the_bits_are_those_of_fsdp2(runs: dict[str, Any], name: str) -> None:
    own, sharded = runs[name]
    assert own["alone"] == 1
    assert own["losses"] == sharded["losses"] and own["norms"] == sharded["norms"]
    assert own["validation"] == sharded["validation"]
    different = [key for key, tensor in sharded["final"].items() if not torch.equal(own["final"][key], tensor)]
    assert not different


def test_low_precision_is_that_of_fsdp2(runs: dict[str, Any]) -> None:
    own, sharded = runs[ROUNDS]
    assert own["alone"] == 1
    assert own["losses"] == pytest.approx(sharded["losses"], rel=1e-4)
    assert own["norms"] == pytest.approx(sharded["norms"], rel=1e-2)
    assert own["losses"][0] == sharded["losses"][0]
