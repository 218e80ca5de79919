"""Verdicts: what holds a run back, judged from the numbers of every rank, told once, with what would help.

This file has the judge: what it sees of a run, and when it tells. `verdict_rules.py` has the rules. Neither imports
torch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from shardwise.plan import Plan

# Names of what each rank tells: metrics/host_timing.py says what they mean
SECONDS, BUSY, COMPUTE = "step/seconds", "step/host_seconds", "step/compute_seconds"
WAITING, IDLE, COLLECTING = "step/communication_seconds", "step/device_idle", "step/garbage_seconds"
COLLECTIONS, HOST_MEMORY, DEVICE_MEMORY = "memory/garbage_collections", "memory/host_gib", "memory/device_gib"
RETRIES = "memory/allocator_retries"
DATA_WAIT = "train/data_wait"

IN_A_ROW = 3  # observations in a row that must say the same
_KEPT = 64  # rows of memory; of more, every second one is dropped
_TELLINGS = 3  # of one verdict, at most
_ENDED = 10  # observations in a row without a verdict: if it is found after these, it has come back
_WORSE = 1.5  # times as severe as when it was told: it is told again


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    host: str
    gpu: str | None  # None: it computes on the CPU


@dataclass(frozen=True)
class Verdict:
    """Something that holds the run back."""

    name: str
    sentence: str
    remedy: str  # the override that would help, and what else to do
    numbers: Mapping[str, float] = field(default_factory=dict)  # the evidence
    severity: float = 1.0  # larger is worse; compared with that of the same verdict alone
    rank: int | None = None  # None: all ranks
    cause: str = ""  # of a straggler
    is_note: bool = False  # how the run is, and nothing that is wrong

    @property
    def key(self) -> tuple[str, int | None, str]:
        return self.name, self.rank, self.cause

    @property
    def text(self) -> str:
        return f"{self.name}: {self.sentence}; {self.remedy}"


@dataclass(frozen=True)
class Limits:
    """From where on a number is a verdict. Ranks on CPUs share cores, so that small differences say nothing there."""

    step_seconds: float  # shorter steps say nothing about time
    ratio: float  # a straggler's number, divided by the median of the other ranks'
    share: float  # of the step, by which a straggler is slower than that median
    data_wait: float  # the share of the time
    observation_seconds: float = 0.5  # rows are put together until they cover so long


GPU_LIMITS = Limits(step_seconds=0.005, ratio=1.1, share=0.03, data_wait=0.05)
CPU_LIMITS = Limits(step_seconds=0.02, ratio=1.5, share=0.25, data_wait=0.10)


@dataclass(frozen=True)
class Size:
    """A size of the model or of a batch that is no multiple of what tensor cores take at once."""

    name: str  # the override that sets it, or the layer that has it
    now: int
    better: int
    multiple: int
    detail: str  # why that matters here


@dataclass(frozen=True)
class Circumstances:
    """What a rule knows of a run besides its numbers."""

    plan: Plan
    places: tuple[Place, ...]  # of each rank
    parameters: int = 0  # of the whole module
    has_layers: bool = True  # that repeat, on which compile=layer acts
    sizes: tuple[Size, ...] = ()  # that tensor cores do not like

    @property
    def limits(self) -> Limits:
        return CPU_LIMITS if self.plan.accelerator == "cpu" else GPU_LIMITS

    def where(self, rank: int) -> str:
        place = self.places[rank]
        gpu = f", {place.gpu}" if place.gpu else ""
        return f"rank {rank} (host {place.host}{gpu})"


@dataclass(frozen=True)
class Observation:
    """Rows put together: means of a step, and what is counted as it was at the last of them."""

    step: int
    steps: int
    values: dict[str, list[float]]  # name → one number a rank; NaN: the rank does not know it
    exposed_communication: float | None = None  # the share of a step, by the run's last profile

    def known(self, name: str) -> dict[int, float]:
        """Rank → number, of the ranks that know it."""
        return {rank: value for rank, value in enumerate(self.values.get(name, ())) if not math.isnan(value)}

    def share(self, name: str, rank: int) -> float:
        """A rank's seconds of this name as a share of its step."""
        return self.values[name][rank] / max(self.values[SECONDS][rank], 1e-9)


@dataclass(frozen=True)
class Seen:
    """What a rule judges."""

    last: Sequence[Observation]  # the last IN_A_ROW
    rows: Sequence[Observation]  # of the whole run, at equal distances: how memory grows

    def means(self, name: str) -> dict[int, float]:
        """Rank → mean over the last observations, of the ranks that know it in all of them."""
        known = [one.known(name) for one in self.last]
        return {rank: mean([of[rank] for of in known]) for rank in known[-1] if all(rank in of for of in known)}


Find = Callable[[Seen, Circumstances], Iterator[Verdict]]


@dataclass(frozen=True)
class Rule:
    """One kind of verdict. docs/metrics.md has a table of them."""

    name: str
    when: str
    remedy: str
    find: Find
    needs_long_steps: bool = True  # it judges times, which say nothing of very short steps
    at_start: bool = False  # it needs no rows


@dataclass
class _Told:
    verdict: Verdict
    times: int = 1
    absent: int = 0  # the last observations in which it was not found


class Judge:
    """Takes the rows of a run and says what is new about them."""

    def __init__(self, circumstances: Circumstances, rules: Sequence[Rule]) -> None:
        self.circumstances, self.rules = circumstances, rules
        self.told: dict[tuple[str, int | None, str], Verdict] = {}  # everything that was told, the worst of each
        self._states: dict[tuple[str, int | None, str], _Told] = {}
        self._last: deque[Observation] = deque(maxlen=IN_A_ROW)
        self._rows: list[Observation] = []
        self._every = 1  # of so many rows, one is kept
        self._offered = 0
        self._pending: list[Observation] = []
        self._covered = 0.0  # the seconds of the steps in `_pending`
        self._row_step: int | None = None

    def add(self, step: int, values: dict[str, list[float]], exposed: float | None = None) -> list[Verdict]:
        """Add a row; returns what is to be told now. The first row of a process compiles and connects: it only begins.

        `exposed`: the share of communication that nothing hides in a step of the last profile, if there is one.
        """
        before, self._row_step = self._row_step, step
        if before is None or step <= before:
            return []
        row = Observation(step, step - before, values, exposed)
        self._keep(row)
        self._pending.append(row)
        self._covered += row.steps * max(row.known(SECONDS).values(), default=math.inf)
        if self._covered < self.circumstances.limits.observation_seconds:
            return []
        self._last.append(_together(self._pending))
        self._pending, self._covered = [], 0.0
        return self._judge()

    def begin(self) -> list[Verdict]:
        """What is to be told before the first step."""
        rules = [rule for rule in self.rules if rule.at_start]
        return self.tell([verdict for rule in rules for verdict in rule.find(Seen((), ()), self.circumstances)])

    def tell(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """What of these was not told, has ended and come back, or is markedly worse."""
        return [verdict for verdict in verdicts if self._is_new(verdict)]

    @property
    def in_force(self) -> list[Verdict]:
        """What holds now, without notes."""
        return [state.verdict for state in self._states.values() if not state.absent and not state.verdict.is_note]

    def _judge(self) -> list[Verdict]:
        seen = Seen(tuple(self._last), tuple(self._rows))
        found = [
            verdict
            for rule in self.rules
            if not rule.needs_long_steps or self._steps_are_long()
            for verdict in rule.find(seen, self.circumstances)
        ]
        for key in self._states.keys() - {verdict.key for verdict in found}:
            self._states[key].absent += 1
        return self.tell(found)

    def _steps_are_long(self) -> bool:
        shortest = self.circumstances.limits.step_seconds
        return len(self._last) == IN_A_ROW and all(
            min(one.known(SECONDS).values(), default=0.0) >= shortest for one in self._last
        )

    def _is_new(self, verdict: Verdict) -> bool:
        state = self._states.get(verdict.key)
        if state is None:
            self._states[verdict.key] = _Told(verdict)
            self.told[verdict.key] = verdict
            return True
        is_back, is_worse = state.absent >= _ENDED, verdict.severity >= _WORSE * state.verdict.severity
        state.absent = 0
        if not (is_back or is_worse) or state.times >= _TELLINGS:
            return False
        state.verdict, state.times = verdict, state.times + 1
        self.told[verdict.key] = max(self.told[verdict.key], verdict, key=lambda one: one.severity)
        return True

    def _keep(self, row: Observation) -> None:
        self._offered += 1
        if self._offered % self._every:
            return
        self._rows.append(row)
        if len(self._rows) > _KEPT:
            del self._rows[::2]
            self._every *= 2


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def of_others(values: Mapping[int, float], rank: int) -> float:
    """The median of the other ranks' numbers; 0 if there are none."""
    return median([value for other, value in values.items() if other != rank] or [0.0])


def _together(rows: Sequence[Observation]) -> Observation:
    """Means over the steps of several rows; what is counted is that of the last."""
    last = rows[-1]
    values = {
        name: now if name.startswith("memory/") else [_mean(rows, name, rank) for rank in range(len(now))]
        for name, now in last.values.items()
    }
    return Observation(last.step, sum(row.steps for row in rows), values, last.exposed_communication)


def _mean(rows: Sequence[Observation], name: str, rank: int) -> float:
    known = [(value, row.steps) for row in rows if not math.isnan(value := row.values[name][rank])]
    return sum(value * steps for value, steps in known) / sum(n for _, n in known) if known else math.nan
