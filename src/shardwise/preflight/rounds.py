"""Who meets whom: rounds of pairs in which everybody is busy at the same time. Pure arithmetic."""

from __future__ import annotations

import math
import random

MOST = 16  # of these everybody meets everybody
SAMPLED = 15  # rounds of more: as many as 16 need

Pair = tuple[int, int]


def make_rounds(count: int, seed: int = 0) -> list[list[Pair]]:
    """Rounds of disjoint pairs out of `count`.

    Up to `MOST` every pair meets once. Above, `SAMPLED` rounds: everybody meets equally many others, 15 where `count`
    is even and 10 where it is odd, and no pair meets twice; which, `seed` says.
    """
    if count <= MOST:
        return _everybody(count)
    draw = random.Random(seed)
    if count % 2 == 0:
        return draw.sample(_everybody(count), SAMPLED)
    # Of an odd number one sits out in each round. Here i meets i ± step for a few steps: cycles, each in three rounds
    steps = draw.sample(range(1, count // 2 + 1), SAMPLED // 3)
    return [pairs for step in steps for pairs in _neighbours(count, step)]


def _everybody(count: int) -> list[list[Pair]]:
    """The circle method: one stays, the others turn by a place a round."""
    even = count + count % 2  # who meets the one that is not there sits out
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
            here, there = ((start + (place + i) * step) % count for i in (0, 1))
            rounds[2 if place == length - 1 else place % 2].append((min(here, there), max(here, there)))
    return [sorted(pairs) for pairs in rounds]
