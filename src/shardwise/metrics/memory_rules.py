"""Judges how the memory of a run grows, and whether its allocator is at its limit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from shardwise.forecast.remedies import remedies
from shardwise.metrics.verdicts import (
    DEVICE_MEMORY,
    HOST_MEMORY,
    IN_A_ROW,
    RETRIES,
    Circumstances,
    Seen,
    Verdict,
    mean,
)

GROWTH, GROWTH_GIB = 0.02, {DEVICE_MEMORY: 1 / 16, HOST_MEMORY: 1 / 8}  # of the whole run, both
_LEAK_ROWS = 16


def leaking_memory(seen: Seen, run: Circumstances) -> Iterator[Verdict]:
    for name, what in ((DEVICE_MEMORY, "tensors"), (HOST_MEMORY, "the process")):
        first, last = seen.rows[0], seen.rows[-1]
        before_of = first.known(name)
        grown = {rank: now - before_of.get(rank, now) for rank, now in last.known(name).items()}
        rank = max(grown, key=grown.__getitem__, default=None)
        if rank is None or not (growth := _growth([row.values[name][rank] for row in seen.rows], GROWTH_GIB[name])):
            continue
        before, now = before_of[rank], last.values[name][rank]
        rate = growth / (last.step - first.step)
        yield Verdict(
            "leaking memory",
            f"the memory of {what} of {run.where(rank)} grows by {rate * 1024:.3g} MiB a step, from "
            f"{before:.2f} GiB at step {first.step} to {now:.2f} GiB at step {last.step}",
            "look for losses or outputs that are kept from step to step without .item() or .detach()"
            + ("; memory_history=true names the lines that allocate" if run.plan.accelerator == "cuda" else ""),
            {"gib_before": before, "gib_now": now},
            rate,
            rank,
        )


def _growth(values: list[float], least: float) -> float:
    """The growth over the run, if it went on in every quarter of it and was not small; else 0."""
    if len(values) < _LEAK_ROWS:
        return 0.0
    quarter = len(values) // 4
    means = [mean(values[i * quarter : (i + 1) * quarter]) for i in range(4)]
    steps, whole = [b - a for a, b in pairwise(means)], values[-1] - values[0]
    is_steady = min(steps) > 0.5 * max(steps) > 0
    return whole if is_steady and whole > max(GROWTH * values[0], least) else 0.0


def allocator_at_limit(seen: Seen, run: Circumstances) -> Iterator[Verdict]:
    counts_of = [one.known(RETRIES) for one in seen.last]
    for rank in counts_of[-1] if len(counts_of) == IN_A_ROW else ():
        counts = [counts.get(rank, 0.0) for counts in counts_of]
        if all(later > earlier for earlier, later in pairwise(counts)):
            yield Verdict(
                "allocator at its limit",
                f"{run.where(rank)} has too little memory, so that its allocator has given memory back and asked again "
                f"{counts[-1]:.0f} times, which takes time",
                " or ".join(remedies(run.plan, None, None)[:2]),
                {"retries": counts[-1]}, rank=rank,
            )  # fmt: skip
            return
