"""Layers are cut over stages so that the slowest stage is as fast as it can be: compared with every possible cut."""

import itertools
import random

import pytest

from shardwise.errors import ConfigError
from shardwise.plan.pipeline import check_split, split_units, stage_costs


def every_split(units: int, stages: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, units), stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise([0, *cut, units])) for cut in cuts]


def test_8b_in_four_stages_counts_its_head() -> None:
    """Its head has the weights of 2.4 layers."""
    assert split_units([1.0] * 32, 4, behind=2.4) == (9, 9, 8, 6)
    assert split_units([1.0] * 32, 4) == (8, 8, 8, 8)
    assert stage_costs((9, 9, 8, 6), [1.0] * 32, behind=2.4) == pytest.approx((9, 9, 8, 8.4))


def test_no_other_cut_has_a_faster_slowest_stage() -> None:
    random.seed(0)
    for _ in range(200):
        units, before, behind = random.randint(1, 9), 3 * random.random(), 3 * random.random()
        costs = [random.random() for _ in range(units)]
        stages = random.randint(1, units)
        split = split_units(costs, stages, before, behind)
        assert len(split) == stages and min(split) > 0 and sum(split) == units
        slowest = [max(stage_costs(other, costs, before, behind)) for other in every_split(units, stages)]
        assert max(stage_costs(split, costs, before, behind)) == pytest.approx(min(slowest))


def test_of_equally_fast_cuts_the_most_even_is_taken() -> None:
    assert split_units([1.0] * 5, 4, behind=2.0) == (2, 1, 1, 1)  # 3 anyway; 1, 1, 2 and 1 would do as well
    assert split_units([4.0, 1.0, 1.0, 1.0, 1.0], 3) == (1, 2, 2)
    assert split_units([1.0, 5.0, 2.0, 3.0], 3) == (1, 1, 2)  # 6, 2 and 3 would be more even, and slower


def test_fewer_layers_than_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 layers cannot be cut into 4 stages .*: use at most 3 stages"):
        split_units([1.0] * 3, 4)


@pytest.mark.parametrize("split", [(8, 8), (0, 4, 4), (3, 3, 3), (-1, 4, 5), ()])
def test_a_split_that_leaves_something_out_is_one_message(split: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        check_split(split, 8, 3)
    message = str(error.value)
    assert "must have 3 numbers" in message and "a sum of 8" in message and "for instance [3,3,2]" in message
    check_split((3, 3, 2), 8, 3)


def test_the_message_of_a_split_for_too_few_layers_names_no_split() -> None:
    with pytest.raises(ConfigError, match=r"3 layers cannot be cut into 4 stages"):
        check_split((1, 1, 1), 3, 4)
