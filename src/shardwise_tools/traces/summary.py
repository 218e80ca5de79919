"""What a profile of some steps says, in milliseconds, and which of several ranks is slow for what reason."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from shardwise_tools.traces.steps import (
    CAUSES,
    PHASES,
    IdleTime,
    StepWindow,
    StepWork,
    calls_of_phases,
    device_phases,
    step_windows,
    step_work,
    within,
)
from shardwise_tools.traces.trace import COPY, KINDS, OTHER, DeviceEvents, Times, Trace, Union

MOST_KERNELS = 10
MOST_OTHER = 0.05  # of the time that computes: above it, the kernels without a kind are named


@dataclass(frozen=True)
class StepTime:
    """One step, in ms: compute_ms + exposed_communication_ms + copies_alone_ms + idle_ms = span_ms."""

    number: int
    span_ms: float
    compute_ms: float
    exposed_communication_ms: float
    copies_alone_ms: float
    idle_ms: float
    communication_ms: float  # exposed or beside compute
    waiting_for_data_ms: float  # these four are idle_ms; steps.py says what they mean
    synchronising_ms: float
    launching_ms: float
    between_kernels_ms: float


@dataclass(frozen=True)
class Kernel:
    """A kernel that cost much. `total_ms` and `calls` are those of a step."""

    name: str
    kind: str
    calls: float
    total_ms: float
    mean_us: float


@dataclass(frozen=True)
class Phase:
    """A phase of a step. Phases overlap: gathers and reductions run beside forward and backward."""

    name: str
    host_ms: float  # the host was in it
    device_ms: float  # something that it launched was running
    calls: float


@dataclass(frozen=True)
class IdlePlace:
    """What an idle time came from: a line of Python, an operator or a phase."""

    cause: str  # of steps.CAUSES
    place: str
    ms: float


@dataclass(frozen=True)
class ProfileSummary:
    """Where the time of the profiled steps went on one rank. All but `steps` are means of a step."""

    rank: int
    is_cpu: bool  # operators of the CPU stand for kernels
    device_name: str
    host_name: str
    steps: tuple[StepTime, ...]
    step: StepTime  # the mean of `steps`; its number is that of the first
    kinds_ms: dict[str, float]  # of each kind of kernel that computes; together they are step.compute_ms
    kernels: tuple[Kernel, ...]  # the ten that cost most
    kernels_per_step: float
    phases: tuple[Phase, ...]
    idle_places: tuple[IdlePlace, ...]  # the costliest first
    other_names: tuple[str, ...]  # the kernels without a kind, the costliest first
    notes: tuple[str, ...]  # what a reader of these figures has to know

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> ProfileSummary:
        """What `to_json` has written."""
        content: dict[str, Any] = json.loads(text)
        parts: dict[str, Any] = {"steps": StepTime, "kernels": Kernel, "phases": Phase, "idle_places": IdlePlace}
        for name, part in parts.items():
            content[name] = tuple(part(**row) for row in content[name])
        return ProfileSummary(
            **content
            | {"step": StepTime(**content["step"])}
            | {name: tuple(content[name]) for name in ("other_names", "notes")}
        )

    @property
    def other_share(self) -> float:
        """The share of the kernels whose kind is not known in the time that computes."""
        return self.kinds_ms.get(OTHER, 0.0) / self.step.compute_ms if self.step.compute_ms else 0.0

    def share(self, part: str) -> float:
        """A part of the step: `share("idle")`, `share("exposed_communication")`, `share("synchronising")` …"""
        value: float = getattr(self.step, f"{part}_ms")
        return value / self.step.span_ms if self.step.span_ms else 0.0


def summarize(trace: Trace, *, rank: int | None = None) -> ProfileSummary:
    """Read a trace's steps. `rank` is by default the one that the trace names, else 0."""
    windows = step_windows(trace)
    idle = IdleTime(trace)
    works = [step_work(trace.device, window.begin, window.end) for window in windows]
    steps = tuple(_step_time(window, work, idle.of(window)) for window, work in zip(windows, works, strict=True))
    device = within(trace.device, windows[0].begin, windows[-1].end)
    kinds = {kind: sum(work.kinds[kind] for work in works) / len(works) / 1e6 for kind in works[0].kinds}
    other_names = _names_by_cost(trace, device.where(device.kind == KINDS.index(OTHER)))
    is_kernel = device.kind != KINDS.index(COPY)
    summary = ProfileSummary(
        rank=rank if rank is not None else trace.rank or 0,
        is_cpu=trace.is_cpu,
        device_name=trace.device_name,
        host_name=trace.host_name,
        steps=steps,
        step=_mean(steps),
        kinds_ms=kinds,
        kernels=tuple(_kernels(trace, device, len(steps))),
        kernels_per_step=round(float(is_kernel.sum()) / len(steps), 1),
        phases=tuple(_phases(trace, device, idle, windows)),
        idle_places=tuple(IdlePlace(cause, place, ns / 1e6 / len(steps)) for cause, place, ns in idle.places()),
        other_names=tuple(other_names[:MOST_KERNELS]),
        notes=(),
    )
    return replace_notes(summary, [*trace.notes, *_notes(trace, device, summary)])


def replace_notes(summary: ProfileSummary, notes: Iterable[str]) -> ProfileSummary:
    values = {field.name: getattr(summary, field.name) for field in fields(summary)}
    return ProfileSummary(**values | {"notes": tuple(notes)})


def _notes(trace: Trace, device: DeviceEvents, summary: ProfileSummary) -> Iterable[str]:
    if trace.is_cpu:
        yield "no GPU in this trace: the host's operators stand for kernels"
    if summary.other_share > MOST_OTHER:
        named = ", ".join(summary.other_names[:3])
        yield f"{summary.other_share:.0%} of the compute is of kernels whose kind is not known: {named}"
    unknown = float((device.thread < 0).mean()) if len(device) else 0.0
    if unknown > 0.01:
        yield f"{unknown:.0%} of the kernels have no launch in the trace: their idle time counts as launching"


def _step_time(window: StepWindow, work: StepWork, idle: dict[str, int]) -> StepTime:
    values = {
        "span": window.end - window.begin, "compute": work.compute, "exposed_communication": work.exposed_communication,
        "copies_alone": work.copies_alone, "idle": work.idle, "communication": work.communication,
    } | {cause: idle[cause] for cause in CAUSES}  # fmt: skip
    return StepTime(window.number, **{f"{name}_ms": ns / 1e6 for name, ns in values.items()})


def _mean(steps: tuple[StepTime, ...]) -> StepTime:
    names = [field.name for field in fields(StepTime) if field.name != "number"]
    return StepTime(
        steps[0].number, **{name: float(np.mean([getattr(step, name) for step in steps])) for name in names}
    )


def _kernels(trace: Trace, device: DeviceEvents, steps: int) -> Iterable[Kernel]:
    """The costliest kernels; copies of the copy engine are none."""
    chosen = device.where(device.kind != KINDS.index(COPY))
    key, size = chosen.name * len(KINDS) + chosen.kind, len(trace.names) * len(KINDS)
    by_kind = np.bincount(key, weights=chosen.end - chosen.begin, minlength=size).reshape(-1, len(KINDS))
    cost, kinds = by_kind.sum(axis=1), by_kind.argmax(axis=1)
    calls = np.bincount(_called(trace, chosen), minlength=len(trace.names))
    for name in np.argsort(-cost, kind="stable")[:MOST_KERNELS]:
        if cost[name] and calls[name]:
            mean = cost[name] / calls[name] / 1e3
            yield Kernel(trace.names[name], KINDS[kinds[name]], calls[name] / steps, cost[name] / 1e6 / steps, mean)


def _called(trace: Trace, device: DeviceEvents) -> Times:
    """The name of every kernel that began; an operator of the CPU is many pieces, and was called once."""
    if not trace.is_cpu or not len(device):
        return device.name
    begin, end = device.begin.min(), device.end.max()
    calls = [e.where((e.begin >= begin) & (e.begin < end)) for e in (trace.operations, trace.annotations)]
    return np.concatenate([events.name for events in calls])


def _names_by_cost(trace: Trace, device: DeviceEvents) -> list[str]:
    cost = np.bincount(device.name, weights=device.end - device.begin, minlength=len(trace.names))
    return [trace.names[name] for name in np.argsort(-cost, kind="stable") if cost[name] > 0]


def _phases(trace: Trace, device: DeviceEvents, idle: IdleTime, windows: list[StepWindow]) -> Iterable[Phase]:
    of_device, calls = device_phases(trace, device, idle.phases), calls_of_phases(trace)
    first, last = trace.steps[0].begin, trace.steps[-1].end
    for number, phase in enumerate(PHASES):
        mine = device.where(of_device == number)
        on_device = Union.of(mine.begin, mine.end).total / 1e6 / len(windows)
        on_host = idle.phases[phase].clipped(first, last).total / 1e6 / len(windows) if phase in idle.phases else 0.0
        if on_device or on_host:
            yield Phase(phase, on_host, on_device, calls[phase] / len(windows))


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
    idle_cause: str | None  # of a late rank: what it waits for most beyond the others, one of steps.CAUSES
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
