"""Pairs of ranks: the rounds in which they meet, and which of their rates are unusual. Pure arithmetic."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from statistics import median

# Plans which pairs meet: rounds of pairs in which all are busy at the same time. Pure arithmetic.

MOST = 16  # up to this number every pair meets
SAMPLED = 15  # with more, there are this many rounds: as many as 16 need

Pair = tuple[int, int]


def make_rounds(count: int, seed: int = 0) -> list[list[Pair]]:
    """Rounds of disjoint pairs out of `count`.

    Up to `MOST` every pair meets once. With more there are `SAMPLED` rounds, which `seed` chooses: each meets equally
    many others, 15 if `count` is even and 10 if it is odd, and no pair meets twice.
    """
    if count <= MOST:
        return _everybody(count)
    draw = random.Random(seed)
    if count % 2 == 0:
        return draw.sample(_everybody(count), SAMPLED)
    # With an odd number one sits out in each round. Here i meets i ± step for a few steps, which makes cycles of odd
    # length, and each of them takes three rounds
    steps = draw.sample(range(1, count // 2 + 1), SAMPLED // 3)
    return [pairs for step in steps for pairs in _neighbours(count, step)]


def _everybody(count: int) -> list[list[Pair]]:
    """Every pair once, by the circle method: one stays, and the others turn by a place each round."""
    even = count + count % 2  # with an odd count there is one that does not exist: who meets it sits out
    rounds = []
    for turn in range(even - 1):
        circle = [even - 1, *((turn + place) % (even - 1) for place in range(even - 1))]
        pairs = [(circle[0], circle[1])] + [(circle[1 + i], circle[-i]) for i in range(1, even // 2)]
        rounds.append(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < count))
    return rounds


def _neighbours(count: int, step: int) -> list[list[Pair]]:
    rounds: list[list[Pair]] = [[], [], []]
    cycles = math.gcd(count, step)
    length = count // cycles  # odd, as `count` is
    for start in range(cycles):
        for place in range(length):
            first, second = ((start + (place + i) * step) % count for i in (0, 1))
            rounds[2 if place == length - 1 else place % 2].append((min(first, second), max(first, second)))
    return [sorted(pairs) for pairs in rounds]


# Judges rates between pairs: which rate is usual, and which unit is in most of the slow pairs. Pure arithmetic.


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
