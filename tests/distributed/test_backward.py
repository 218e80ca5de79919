"""Modules whose backward pass finds weights gone unless their strategy sees to it: the same numbers as under ddp."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.anybodys_module import RANKS
from tests.harness.backward import BOUNDS, CELLS, REFUSED, off, run
from tests.harness.processes import spawn


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    return spawn(RANKS, run, tmp_path_factory.mktemp("backward"))[0]


def test_second_derivatives_views_and_objects_give_the_numbers_of_ddp(done: dict[Any, Any]) -> None:
    for key in CELLS:
        module, _, precision, *_ = key
        cell, base = done[key], done[module, "ddp", precision]
        assert off(done, key) <= BOUNDS[precision], key
        for name, value in base["validation"].items():
            assert cell["validation"][name] == pytest.approx(value, rel=BOUNDS[precision]), key


def test_what_zero3_cannot_do_is_refused_by_name(done: dict[Any, Any]) -> None:
    for number, (*_, expected) in enumerate(REFUSED):
        assert done[number].startswith(expected)
