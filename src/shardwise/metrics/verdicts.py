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

# Names of what each rank tells: metrics/meter.py says what they mean
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


# Finds the rank that the others wait for, and why it is slow.
#
# All ranks' steps take equally long, since they wait for each other: what is compared is what each does by itself.

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


# The override that a verdict names: one that this run can take as it is, since its Plan decides what is possible.


def more_workers(plan: Plan) -> str:
    """What makes data come sooner."""
    workers = (plan.data or {}).get("num_workers")
    if isinstance(workers, int):
        return f"data.num_workers={max(4, 2 * workers)} reads ahead with more processes"
    return "give the loader more workers (num_workers=), or data that need less work"


def compiled(plan: Plan, has_layers: bool) -> str | None:
    """How to compile a module that is not: by its layers, if some repeat. None: it is, or cannot be."""
    if plan.compile.name != "none" or (plan.capabilities.compiled_step and not has_layers):
        return None
    return "compile=layer" if has_layers else "compile=model"


def fewer_launches(plan: Plan, has_layers: bool) -> str:
    """What gives the host less to do for each step, or the device more."""
    if (word := compiled(plan, has_layers)) is not None:
        return f"{word} launches fewer kernels"
    if plan.accelerator == "cuda" and not plan.capabilities.cuda_graphs and not plan.compile.cudagraphs:
        return "compile.cudagraphs=true launches all kernels of a graph at once"
    return f"{larger_micro_batch(plan)} gives each kernel more to do"


def larger_micro_batch(plan: Plan) -> str:
    """The next larger micro-batch with which the global batch stays, or both of them doubled."""
    of_rank = plan.global_batch_size // plan.topology.data_parallel_size
    fits = (size for size in range(plan.micro_batch_size + 1, of_rank + 1) if of_rank % size == 0)
    if (size := next(fits, None)) is not None:
        return f"micro_batch_size={size} (global_batch_size={plan.global_batch_size} stays)"
    return f"micro_batch_size={2 * plan.micro_batch_size} global_batch_size={2 * plan.global_batch_size}"


def faster_products(plan: Plan) -> str:
    """What makes products of matrices faster that keep the tensor cores busy."""
    if plan.precision.fp8 is None and plan.accelerator == "cuda" and not plan.capabilities.fp8:
        return "precision=fp8 computes faster"
    return "only more GPUs are faster"


def measures_gpus(plan: Plan, what: str) -> str:
    """`what` preflight says of a GPU, as the end of a sentence; nothing where it does not know the GPUs."""
    return f"; preflight=true {what}" if plan.accelerator == "cuda" else ""
