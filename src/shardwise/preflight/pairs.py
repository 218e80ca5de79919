"""Rates between pairs: what is usual, and who is in most of the slow ones. Pure arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median

from shardwise.preflight.rounds import Pair


def usual_rate(pairs: Mapping[Pair, float]) -> float:
    """GB/s that one of them reaches with its best partner, in the median; 0: there are too few to tell. The median
    over pairs would be the slow ones' where one of three is slow."""
    units = {unit for pair in pairs for unit in pair}
    if len(units) < 3:
        return 0.0
    return median(max(rate for pair, rate in pairs.items() if unit in pair) for unit in units)


def blame(
    slow: Mapping[Pair, float], pairs: Mapping[Pair, float]
) -> tuple[dict[int, dict[Pair, float]], dict[Pair, float]]:
    """Who is in most of the slow pairs, one after the other, with them; and the slow pairs that are nobody's.

    It must stand out: in at least two of them and in half of its own, and in more than anybody else.
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
