"""Cuts a model's layers into the stages of a pipeline, so that the slowest stage is as fast as it can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import fsum, inf

from shardwise.errors import ConfigError, count

_ROUNDING = 1 + 1e-9


def split_units(costs: Sequence[float], stages: int, before: float = 0.0, behind: float = 0.0) -> tuple[int, ...]:
    """The number of consecutive units of each stage.

    The largest cost of a stage is as small as it can be, for every micro-batch waits for that stage. Among the cuts
    that share it, the costs of the stages are as even as they can be; then earlier stages get more units.

    Args:
        costs: the cost of each unit, in any unit of work, such as FLOPs of a forward and a backward.
        stages: the number of stages; each gets a unit at least.
        before: the cost of what stands before the units, on the first stage.
        behind: the cost of what stands behind them, such as the head, on the last stage.

    Raises:
        ConfigError: fewer units than stages.
    """
    if len(costs) < stages:
        raise ConfigError(
            f"{count(len(costs), 'layer')} cannot be cut into {count(stages, 'stage')} (pipeline_parallel_size * "
            f"pipeline_chunks): use at most {count(len(costs), 'stage')}"
        )
    sums = [0.0, *accumulate(costs)]

    def cost(begin: int, end: int) -> float:
        ends = (before if begin == 0 else 0.0) + (behind if end == len(costs) else 0.0)
        return sums[end] - sums[begin] + ends

    largest = [inf] * len(costs) + [0.0]  # of the units from i on, cut into the stages so far
    for _ in range(stages):
        largest = [
            min((max(cost(i, j), largest[j]) for j in range(i + 1, len(costs) + 1)), default=inf)
            for i in range(len(costs) + 1)
        ]
    bound = largest[0] * _ROUNDING
    squares, ways = [inf] * len(costs) + [0.0], []
    for _ in range(stages):
        found = [_most_even(cost, squares, i, bound) for i in range(len(costs) + 1)]
        squares = [square for square, _ in found]
        ways.append([end for _, end in found])
    split, begin = [], 0
    for ends in reversed(ways):
        split.append(ends[begin] - begin)
        begin = ends[begin]
    return tuple(split)


def _most_even(
    cost: Callable[[int, int], float], squares: Sequence[float], begin: int, bound: float
) -> tuple[float, int]:
    """The smallest sum of squares from unit `begin` on, and where its first stage ends."""
    best, end = inf, begin
    for j in range(begin + 1, len(squares)):
        stage = cost(begin, j)
        if stage <= bound and stage**2 + squares[j] <= best * _ROUNDING:
            best, end = stage**2 + squares[j], j
    return best, end


def stage_costs(
    split: Sequence[int], costs: Sequence[float], before: float = 0.0, behind: float = 0.0
) -> tuple[float, ...]:
    """The cost of each stage of a split, with what stands before the units and behind them."""
    ends = [0, *accumulate(split)]
    own = [fsum(costs[begin:end]) for begin, end in pairwise(ends)]
    own[0] += before
    own[-1] += behind
    return tuple(own)


def check_split(split: Sequence[int], units: int, stages: int) -> tuple[int, ...]:
    """`split`, unless it leaves a unit or a stage out.

    Raises:
        ConfigError: another number of stages, a stage without units, another sum than there are units, or fewer
            units than stages.
    """
    if len(split) == stages and min(split) > 0 and sum(split) == units:
        return tuple(split)
    fitting = ",".join(map(str, split_units([1.0] * units, stages)))
    raise ConfigError(
        f"pipeline_split=[{','.join(map(str, split))}] must have {count(stages, 'number')} (pipeline_parallel_size * "
        f"pipeline_chunks), each at least 1, with a sum of {units}, the model's layers; it has {len(split)} with a sum "
        f"of {sum(split)}; use for instance [{fitting}], or leave it out"
    )
