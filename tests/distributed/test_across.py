"""A checkpoint is a run's, not a strategy's: saved under any, a run goes on under any other, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.across import BOUND, NAMES, Side, resume_all, save_all, sides
from tests.harness.processes import spawn
from tests.harness.selected import needed

OPTIMIZERS = ["sgd", "adamw"]
OFFLOADED = ["zero2, optimizer offloaded", "zero3, all offloaded"]
# Every strategy is saved under and gone on with, on more ranks and on fewer.
MORE = [(Side(a, 2), Side(b, 4)) for a, b in zip(NAMES, [*NAMES[3:], *NAMES[:3]], strict=True)]
FEWER = [(Side("ddp", 2), Side("fsdp", 1)), (Side("zero3", 2), Side("ddp", 1)),
         (Side("fsdp", 2), Side("zero1", 1)), (Side("zero1", 2), Side("zero3", 1))]  # fmt: skip
SAME = [(Side("zero2", 2), Side(OFFLOADED[0], 2)), (Side(OFFLOADED[1], 2), Side("fsdp", 2)),
        (Side("zero1", 2), Side("zero3", 2)), (Side("fsdp", 2), Side(OFFLOADED[1], 2))]  # fmt: skip
PIPELINE = Side("pipeline", 2)
MORE.append((PIPELINE, Side("pipeline", 4)))
SAME += [(PIPELINE, Side("ddp", 2)), (PIPELINE, Side("zero2", 2)), (Side("ddp", 2), PIPELINE),
         (Side("zero2", 2), PIPELINE)]  # fmt: skip
CELLS = {4: (MORE, ["adamw"]), 1: (FEWER, OPTIMIZERS), 2: (SAME, ["adamw"])}  # `make checkpoint-matrix` has all


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, float]]:
    folder, wanted = tmp_path_factory.mktemp("across"), needed(request, "pair", "optimizer") or set()
    saved = {pair[0] for pair, _ in wanted}
    savers = [*sides(NAMES, 2), Side(OFFLOADED[1], 2), PIPELINE]
    spawn(2, save_all, folder, [side for side in savers if side in saved],
          [optimizer for optimizer in OPTIMIZERS if optimizer in {one for _, one in wanted}])  # fmt: skip
    results: dict[Any, dict[str, float]] = {}
    for ranks, (pairs, optimizers) in CELLS.items():
        mine = [pair for pair in pairs if any(pair == other for other, _ in wanted)]
        theirs = [one for one in optimizers if any(pair in mine and one == other for pair, other in wanted)]
        if mine:
            results |= spawn(ranks, resume_all, folder, mine, theirs)[0]
    return results


@pytest.mark.parametrize(
    ("pair", "optimizer"),
    [(pair, optimizer) for pairs, optimizers in CELLS.values() for pair in pairs for optimizer in optimizers],
    ids=lambda one: one if isinstance(one, str) else f"{one[0].name}-to-{one[1].name}",
)
def test_the_run_goes_on(found: Any, pair: tuple[Side, Side], optimizer: str) -> None:
    measured = found[*pair, optimizer]
    assert measured["loss"] <= BOUND and measured["update"] <= 10 * BOUND, measured
