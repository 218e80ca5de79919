"""Compares the profiles of several ranks: which rank is slow, and why?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from shardwise.metrics.profile.idle import CAUSES
from shardwise.metrics.profile.summary import ProfileSummary

DIFFERS = 0.1  # of the median: smaller differences are noise
MATTERS = 0.01  # of the step
_WHY = {
    "waiting_for_data": "since its host is waiting for data",
    "synchronising": "since its host is waiting for the device",
    "launching": "since its host is busy before it launches",
    "between_kernels": "between kernels",
}


@dataclass(frozen=True)
class RankTime:
    """A rank's step, in ms."""

    rank: int
    host_name: str
    span_ms: float
    compute_ms: float
    communication_ms: float
    exposed_communication_ms: float
    idle_ms: float


@dataclass(frozen=True)
class RanksSummary:
    """The ranks of a run side by side.

    Collectives end on all ranks together and begin on each when it arrives. So the rank whose collectives are shortest
    is the one that the others wait for.
    """

    ranks: tuple[RankTime, ...]
    slow_rank: int | None  # None: the ranks are alike, there is one rank, or nothing communicates
    reason: str | None  # "slow_gpu": its kernels take longer; "late": it is idle for longer; "unknown": neither
    idle_cause: str | None  # of a late rank: what it waits for most beyond the others, one of idle.CAUSES
    others_wait_ms: float  # how much longer the median rank does nothing but communicate than the slow one
    text: str  # a sentence that says it

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def summarize_ranks(summaries: Sequence[ProfileSummary]) -> RanksSummary:
    """Compare the profiles of the same steps on several ranks.

    Raises:
        ValueError: there is none, or two are of the same rank.
    """
    if not summaries or len({summary.rank for summary in summaries}) < len(summaries):
        raise ValueError("summarize_ranks takes the summary of each rank once")
    ordered = sorted(summaries, key=lambda summary: summary.rank)
    ranks = tuple(
        RankTime(
            one.rank, one.host_name, one.step.span_ms, one.step.compute_ms, one.step.communication_ms,
            one.step.exposed_communication_ms, one.step.idle_ms,
        )
        for one in ordered
    )  # fmt: skip
    slow = min(ordered, key=lambda one: one.step.communication_ms)
    others = [one for one in ordered if one is not slow]
    if not others or not any(one.step.communication_ms for one in ordered):
        said = "one rank was profiled" if not others else "no rank communicates"
        return RanksSummary(ranks, None, None, None, 0.0, f"{said}: there is nothing to compare")
    median, exposed = (
        float(np.median([getattr(one.step, name) for one in others]))
        for name in ("communication_ms", "exposed_communication_ms")
    )
    # A rank that computes meanwhile loses nothing by a collective that takes longer.
    waits = min(median - slow.step.communication_ms, exposed - slow.step.exposed_communication_ms)
    if waits < DIFFERS * median or waits < MATTERS * slow.step.span_ms:
        return RanksSummary(ranks, None, None, None, waits, "the ranks are alike: no rank waits for another")
    reason, cause, why = _reason(slow, others)
    text = f"rank {slow.rank} is slow: the others wait {waits:.1f} ms a step for it. {why}"
    return RanksSummary(ranks, slow.rank, reason, cause, waits, text)


def _reason(slow: ProfileSummary, others: Sequence[ProfileSummary]) -> tuple[str, str | None, str]:
    """What the slow rank spends most on beyond the others: computing, or one of the causes of being idle."""
    longer = {name: _beyond(slow, others, name) for name in ("compute", *CAUSES)}
    cause = max(longer, key=lambda name: longer[name])
    if longer[cause] <= 0:
        return "unknown", None, "Neither its compute nor its idle time explains it"
    if cause == "compute":
        more = f"it computes {slow.step.compute_ms:.1f} ms, {longer[cause]:.1f} ms more than the others"
        return "slow_gpu", None, f"Its GPU is slow, or has more to do: {more}"
    return "late", cause, f"It comes late: it is idle for {longer[cause]:.1f} ms more than the others, {_WHY[cause]}"


def _beyond(slow: ProfileSummary, others: Sequence[ProfileSummary], name: str) -> float:
    """ms of a step that the slow rank spends on something beyond the median of the others."""
    times = [float(getattr(one.step, f"{name}_ms")) for one in (slow, *others)]
    return times[0] - float(np.median(times[1:]))
