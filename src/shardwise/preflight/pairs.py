"""Judges rates between pairs: which rate is usual, and which unit is in most of the slow pairs. Pure arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median

from shardwise.preflight.rounds import Pair


def usual_rate(pairs: Mapping[Pair, float]) -> float:
    """The median, over all units, of the rate with a unit's best partner in GB/s; 0: there are fewer than three units.

    The median over pairs would be a slow pair's if one of three units is slow.
    """
    units = {unit for pair in pairs for unit in pair}
    if len(units) < 3:
        return 0.0
    return median(max(rate for pair, rate in pairs.items() if unit in pair) for unit in units)


def blame(
    slow: Mapping[Pair, float], pairs: Mapping[Pair, float]
) -> tuple[dict[int, dict[Pair, float]], dict[Pair, float]]:
    """Blame units for slow pairs, one unit after the other: always the one that is in most of those left.

    A unit is blamed only if it is in at least two slow pairs, in half of its own pairs, and in more than any other.

    Returns:
        Each blamed unit with its slow pairs; and the slow pairs for which no unit is blamed.
    """
    left, blamed = dict(slow), dict[int, dict[Pair, float]]()
    while left:
        counts = Counter(unit for pair in left for unit in pair)
        (first, most), (_, second), *_ = counts.most_common()
        if most < 2 or most == second or most * 2 < sum(first in pair for pair in pairs):
            break
        blamed[first] = {pair: rate for pair, rate in left.items() if first in pair}
        left = {pair: rate for pair, rate in left.items() if first not in pair}
    return blamed, left
