"""The layouts of docs/parity.md are measured with every value of what makes them hard."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.harness.axes import MIXTURES, axes_cells
from tests.harness.divided import BATCH, Divided
from tests.harness.layouts import AXES, LAYOUTS, WITHOUT_AXES, Pair, matrix_pairs

CELLS = {cell: name for ranks in (2, 4, 8) for cell, name in axes_cells(ranks).items()}


def values(cells: list[Divided]) -> list[set[Any]]:
    """Of each dimension, the values that occur."""
    rows = [(c.precision, c.optimizer, c.tied, c.accumulate, c.clip, c.more[:1]) for c in cells]
    return [set(column) for column in zip(*rows, strict=True)]


def test_any_two_values_occur_together() -> None:
    for one, other in itertools.combinations(range(5), 2):
        of_one, of_other = ({row[n] for row in MIXTURES} for n in (one, other))
        assert {(row[one], row[other]) for row in MIXTURES} == set(itertools.product(of_one, of_other)), (one, other)


@pytest.mark.parametrize("axis", ["tensor", "context", "pipeline", "interleaved", "shard", "copies", "by heads"])
def test_every_value_occurs_with_every_axis(axis: str) -> None:
    found = values([cell for cell, name in CELLS.items() if axis in name])
    expected = values([Divided((), 1, *row[:5], more=row[5]) for row in MIXTURES])
    if axis == "interleaved":
        expected[3] -= {1}  # a multiple of two
    if axis in ("shard", "copies"):
        expected[3] -= {8}  # a sample each
    assert found == expected


@pytest.mark.parametrize("name", AXES)
def test_every_value_occurs_with_every_layout(name: str) -> None:
    """All but the numbers of micro-batches that the schedule or the batch cannot have."""
    found = values([cell for cell, other in CELLS.items() if other == name])
    assert [len(column) for column in found[:3] + found[4:]] == [2, 2, 2, 2, 3]
    assert max(found[3]) == BATCH // LAYOUTS[name][1]


def test_every_layout_is_saved_and_gone_on_with() -> None:
    """With itself, both ways with what has no axes, and both ways with other layouts."""
    pairs = matrix_pairs(AXES, (1, 2, 4, 8))
    assert len(pairs) == len(set(pairs))
    for name in AXES:
        assert Pair(name, name) in pairs
        assert {(Pair(name, one) in pairs, Pair(one, name) in pairs) for one in WITHOUT_AXES} == {(True, True)}
        others = set(AXES) - {name}
        assert others & {pair.resumed for pair in pairs if pair.saved == name}
        assert others & {pair.saved for pair in pairs if pair.resumed == name}
    assert all(LAYOUTS[pair.saved][0] <= 2 >= LAYOUTS[pair.resumed][0] for pair in matrix_pairs(AXES, (1, 2)))
