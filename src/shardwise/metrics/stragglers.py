"""Finds the rank that the others wait for, and why it is slow.

All ranks' steps take equally long, since they wait for each other: what is compared is what each does by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwise.metrics.overrides import measures_gpus, more_workers
from shardwise.metrics.verdicts import (
    BUSY,
    COMPUTE,
    DATA_WAIT,
    SECONDS,
    Circumstances,
    Observation,
    Seen,
    Verdict,
    mean,
    of_others,
)

HOST_BUSY = 0.8  # of the step: a host that does less is ahead of its GPU, and slows nobody
_CLOCK = "gpu/sm_clock_mhz"
_SLOW_CLOCK = 0.1  # of the other ranks' clock

_Excess = Callable[[Observation, int, Circumstances], float]  # as a share of the step; 0: the rank is none


def straggler(seen: Seen, run: Circumstances) -> Iterator[Verdict]:
    if run.plan.topology.world_size == 1:
        return
    found: dict[tuple[int, str], float] = {}
    for cause, (name, worst, excess) in _CAUSES.items():
        for rank in _first(seen.last[-1].known(name), worst):
            shares = [excess(one, rank, run) for one in seen.last]
            if min(shares) > 0:
                found[rank, cause] = mean(shares)
    for rank, cause in list(found):  # what explains another cause of the same rank stands for it
        for other in _EXPLAINS.get(cause, ()):
            if found.get((rank, other), 0.0) <= 2 * found.get((rank, cause), 0.0):
                found.pop((rank, other), None)
    if found:
        rank, cause = max(found, key=found.__getitem__)
        what, remedy, preflight = _OF_CAUSE[cause]
        word = more_workers(run.plan) + ", on its host" if cause == "data" else remedy
        yield Verdict(
            "straggler",
            f"{run.where(rank)} is slower than the others, which wait for it: {what} "
            f"({found[rank, cause]:.0%} of a step more than the median of the others)",
            word + (measures_gpus(run.plan, preflight) if preflight else ""),
            {"excess": found[rank, cause]}, found[rank, cause], rank, cause,
        )  # fmt: skip


def _first(values: dict[int, float], worst: Callable[..., int]) -> list[int]:
    """The rank that is `worst`: the one with the largest or the smallest number."""
    return [worst(values, key=values.__getitem__)] if values else []


def _waits_for_data(one: Observation, rank: int, run: Circumstances) -> float:
    waits = one.known(DATA_WAIT)
    if waits.get(rank, 0.0) <= run.limits.data_wait:
        return 0.0
    others = of_others(waits, rank)
    return waits[rank] - others if others <= run.limits.data_wait and waits[rank] > run.limits.ratio * others else 0.0


def _slow_host(one: Observation, rank: int, run: Circumstances) -> float:
    is_ahead = run.plan.accelerator != "cpu" and rank in one.known(BUSY) and one.share(BUSY, rank) < HOST_BUSY
    return 0.0 if is_ahead else _more_seconds(one, BUSY, rank, run)


def _computes_longer(one: Observation, rank: int, run: Circumstances) -> float:
    return _more_seconds(one, COMPUTE, rank, run)


def _slow_clock(one: Observation, rank: int, run: Circumstances) -> float:
    clocks = one.known(_CLOCK)
    if rank not in clocks or len(clocks) < 2:
        return 0.0
    share = 1 - clocks[rank] / max(of_others(clocks, rank), 1e-9)
    return share if share > _SLOW_CLOCK else 0.0


def _more_seconds(one: Observation, name: str, rank: int, run: Circumstances) -> float:
    seconds = one.known(name)
    if rank not in seconds or len(seconds) < 2:
        return 0.0
    others = of_others(seconds, rank)
    share = (seconds[rank] - others) / max(one.values[SECONDS][rank], 1e-9)
    return share if seconds[rank] > run.limits.ratio * others and share > run.limits.share else 0.0


# Cause → the number that shows it, whether the largest or the smallest is the worst, and by how much a rank is off
_CAUSES: dict[str, tuple[str, Callable[..., int], _Excess]] = {
    "data": (DATA_WAIT, max, _waits_for_data),
    "host": (BUSY, max, _slow_host),
    "clock": (_CLOCK, min, _slow_clock),
    "compute": (COMPUTE, max, _computes_longer),
}
_EXPLAINS = {"clock": ("compute", "host"), "host": ("compute",)}
# Cause → what is so, what helps, and what preflight says of it
_OF_CAUSE = {
    "data": ("its data come late", "", ""),
    "host": ("its host is slow", "look for other processes on that host, and for work that training_step does there "
                                 "alone", ""),
    "clock": ("its GPU runs at a lower clock", "look at the cooling and power of that node",
              "finds such a GPU before the run, and exclude_bad_nodes=true leaves its node out"),
    "compute": ("it computes longer", "look whether its samples are longer or training_step does more there",
                "measures its GPU, if it is neither"),
}  # fmt: skip
