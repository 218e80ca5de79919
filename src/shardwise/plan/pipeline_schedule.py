"""Pipeline schedules as plain lists: which stage does what with which micro-batch, in which order. No torch here.

The ranks run these lists, and the simulator runs them too: what it says of idle time and memory is of what will run.
Stage s is on position s % ranks; position 0 has the first stage. `Topology.pipeline_rank` is the position of a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from shardwise.errors import ConfigError, count, did_you_mean

Kind = Literal["F", "B"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Action:
    """The forward (F) or the backward (B) of one micro-batch through one stage."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch} of stage {self.stage}"


Schedule = tuple[tuple[Action, ...], ...]  # one list for each position

GPIPE, ONE_F_ONE_B, INTERLEAVED = "gpipe", "1f1b", "interleaved"
SCHEDULES = (GPIPE, ONE_F_ONE_B, INTERLEAVED)


def make_schedule(name: str, ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """The actions of each position in their order.

    Each stage takes the micro-batches in their order, forward and backward alike: gradients then add up in the order
    of a run without a pipeline, and are equal to its to the bit.

    Args:
        name: `gpipe` (all forwards, then all backwards), `1f1b` (a backward as soon as there is one) or `interleaved`
            (1f1b with several stages a rank, which shortens the idle time).
        ranks: the ranks of one pipeline.
        chunks: the stages of each rank.
        micro_batches: the micro-batches of one step.

    Raises:
        ConfigError: there is no such schedule.
    """
    check_schedule(name, ranks, chunks, micro_batches)
    return tuple(tuple(_position(name, position, ranks, chunks, micro_batches)) for position in range(ranks))


def check_schedule(name: str, ranks: int, chunks: int, micro_batches: int) -> None:
    """Refuse what no schedule can be made of.

    Raises:
        ConfigError: an unknown name, a number below 1, or numbers that do not go together.
    """
    if name not in SCHEDULES:
        raise ConfigError(
            f"pipeline_schedule={name}: there is no such schedule{did_you_mean(name, SCHEDULES)}; there is "
            f"{', '.join(SCHEDULES)}"
        )
    numbers = {"pipeline_parallel_size": ranks, "pipeline_chunks": chunks, "micro-batches of a step": micro_batches}
    for word, number in numbers.items():
        if number < 1:
            raise ConfigError(f"{word}={number}: must be at least 1")
    if name != INTERLEAVED and chunks > 1:
        raise ConfigError(
            f"pipeline_chunks={chunks}: {name} has one stage a rank; use pipeline_chunks=1, or "
            f"pipeline_schedule=interleaved for {chunks} stages a rank"
        )
    if name == INTERLEAVED and chunks == 1:
        raise ConfigError(
            "pipeline_chunks=1: interleaved needs at least 2 stages a rank; use pipeline_chunks=2 or more, or "
            "pipeline_schedule=1f1b, which is the same with one stage"
        )
    if name == INTERLEAVED and micro_batches % ranks:
        below, above = micro_batches // ranks * ranks, (micro_batches // ranks + 1) * ranks
        raise ConfigError(
            f"pipeline_schedule=interleaved needs a number of micro-batches in a step that is a multiple of "
            f"pipeline_parallel_size={ranks}, and there are {micro_batches}; use "
            f"{f'{below} or {above}' if below else above} of them (global_batch_size), or pipeline_schedule=1f1b"
        )


def schedule_notice(ranks: int, micro_batches: int) -> str | None:
    """What a user should know of a pipeline that works, but is never full."""
    if micro_batches >= ranks:
        return None
    return (
        f"{count(micro_batches, 'micro-batch')} in a step for {count(ranks, 'rank')} of a pipeline: at no time do all "
        f"of them work; a smaller micro_batch_size or a larger global_batch_size makes more"
    )


def _position(name: str, position: int, ranks: int, chunks: int, micro_batches: int) -> Iterator[Action]:
    total = chunks * micro_batches
    if name == GPIPE:
        ahead = total
    elif name == ONE_F_ONE_B:
        ahead = ranks - 1 - position
    else:  # the first round of micro-batches must have come through the earlier chunks, and back from behind
        ahead = 2 * (ranks - 1 - position) + (chunks - 1) * ranks
    ahead = min(ahead, total)
    for k in range(total + ahead):
        if k < total:
            yield _action("F", k, position, ranks, chunks)
        if k >= ahead:
            yield _action("B", k - ahead, position, ranks, chunks)


def _action(kind: Kind, k: int, position: int, ranks: int, chunks: int) -> Action:
    """The k-th forward or backward of a position: `ranks` micro-batches through a chunk, then through its next one."""
    if chunks == 1:
        return Action(kind, position, k)
    rounds, within = divmod(k, ranks * chunks)
    chunk, number = divmod(within, ranks)
    if kind == "B":
        chunk = chunks - 1 - chunk
    return Action(kind, chunk * ranks + position, rounds * ranks + number)


class DeadlockError(RuntimeError):
    """The lists of a schedule cannot be run to their end: a fault of the one who made them."""


@dataclass(frozen=True)
class Timeline:
    """What the simulator found. Times have the unit of the costs."""

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]  # for each position: action, begin, end
    total: float  # from the first forward to the last backward
    kept: tuple[int, ...]  # for each position: forwards whose backward is still to come, at most

    @property
    def busy(self) -> tuple[float, ...]:
        """The time that each position works."""
        return tuple(sum(end - begin for _, begin, end in own) for own in self.spans)

    @property
    def idle(self) -> float:
        """The share of all ranks' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.spans) * self.total)

    @property
    def bubble(self) -> float:
        """What the step takes beyond the time of the same work spread evenly, over that time."""
        return self.total * len(self.spans) / sum(self.busy) - 1


def simulate(schedule: Schedule, forward: Sequence[float] = (), backward: Sequence[float] = ()) -> Timeline:
    """Run the lists as the ranks would: in order, each action as soon as what it takes has come.

    Sending takes no time and waits for nobody. `forward` and `backward` are the costs of each stage for one
    micro-batch; without them, every forward costs 1 and every backward 2.

    Raises:
        DeadlockError: an action is missing or stands twice, ranks would wait for ever, or would receive in another
            order than is sent.
    """
    stages = 1 + max(action.stage for own in schedule for action in own)
    _check_whole(schedule, stages)
    costs = {"F": forward or [1.0] * stages, "B": backward or [2.0] * stages}
    ends: dict[Action, float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in schedule]
    moved = True
    while moved:
        moved = False
        for own, done in zip(schedule, spans, strict=True):
            for action in own[len(done) :]:
                needs = _needs(action, stages)
                if any(need not in ends for need in needs):
                    break
                begin = max([done[-1][2] if done else 0.0, *(ends[need] for need in needs)])
                ends[action] = begin + costs[action.kind][action.stage]
                done.append((action, begin, ends[action]))
                moved = True
    _check_all_ran(schedule, [len(done) for done in spans], ends, stages)
    _check_order(schedule, stages)
    kept = tuple(int(most_kept(own)) for own in schedule)
    return Timeline(tuple(map(tuple, spans)), max(ends.values()), kept)


def most_kept(actions: Sequence[Action], sizes: Sequence[float] = ()) -> float:
    """The most that is kept at the same time for backwards to come, over the stages of a position.

    `sizes`: what a forward of each stage keeps; without them, forwards are counted.
    """
    most = now = 0.0
    for action in actions:
        size = sizes[action.stage] if sizes else 1.0
        now += size if action.kind == "F" else -size
        most = max(most, now)
    return most


def _needs(action: Action, stages: int) -> list[Action]:
    """What must have run before an action may."""
    kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
    if kind == "F":
        return [Action("F", stage - 1, micro_batch)] if stage else []
    behind = [Action("B", stage + 1, micro_batch)] if stage + 1 < stages else []
    return [Action("F", stage, micro_batch), *behind]


def _check_whole(schedule: Schedule, stages: int) -> None:
    """Each stage takes each micro-batch once forward and once backward, on the position that it is on."""
    ranks = len(schedule)
    there = [action for own in schedule for action in own]
    numbers = range(1 + max(action.micro_batch for action in there))
    for position, own in enumerate(schedule):
        expected = [
            Action(kind, stage, k) for kind in KINDS for stage in range(position, stages, ranks) for k in numbers
        ]
        wrong = [*(Counter(own) - Counter(expected)), *(Counter(expected) - Counter(own))]
        if wrong:
            raise DeadlockError(f"position {position} must run once, and does not: {', '.join(map(str, wrong))}")


def _check_all_ran(schedule: Schedule, done: Sequence[int], ends: dict[Action, float], stages: int) -> None:
    waiting = []
    for position, (own, ran) in enumerate(zip(schedule, done, strict=True)):
        if ran < len(own):
            missing = " and ".join(str(need) for need in _needs(own[ran], stages) if need not in ends)
            waiting.append(f"position {position} waits before {own[ran]} for {missing}")
    if waiting:
        raise DeadlockError("this schedule never ends: " + "; ".join(waiting))


def _check_order(schedule: Schedule, stages: int) -> None:
    """Two ranks of a communicator receive in the order in which was sent, so that no tags are needed."""
    ranks = len(schedule)
    for kind, step in (("F", 1), ("B", -1)):
        for sender in range(ranks):
            receiver = (sender + step) % ranks
            if receiver == sender:
                continue
            sent = [
                Action(a.kind, a.stage + step, a.micro_batch)
                for a in schedule[sender]
                if a.kind == kind and 0 <= a.stage + step < stages
            ]
            taken = [a for a in schedule[receiver] if a.kind == kind and 0 <= a.stage - step < stages]
            for left, right in zip(sent, taken, strict=True):
                if left != right:
                    raise DeadlockError(
                        f"position {sender} sends for {left}, and position {receiver} waits for what {right} takes"
                    )


# Shows a pipeline's schedule as a table: the work, idle time and activations of each rank.


def stages_of(position: int, ranks: int, chunks: int) -> str:
    """`stage 0`, or `stages 0, 4` where a rank has several."""
    stages = range(position, ranks * chunks, ranks)
    return f"stage{'s' * (chunks > 1)} {', '.join(map(str, stages))}"


def describe(name: str, schedule: Schedule, timeline: Timeline, split: Sequence[int] = ()) -> list[str]:
    """Idle time of the whole, and of each rank its share of work and the activations that it keeps.

    `split`: the layers of each stage; without it, all stages are alike.
    """
    ranks = len(schedule)
    stages = 1 + max(action.stage for own in schedule for action in own)
    chunks, micro_batches = stages // ranks, 1 + max(action.micro_batch for action in schedule[0])
    shares = [layers / sum(split) for layers in split] or [1 / stages] * stages
    lines = [
        f"{name}, {count(ranks, 'rank')} × {count(chunks, 'stage')}, {count(micro_batches, 'micro-batch')} a step: "
        f"bubble {timeline.bubble:.1%} of the ideal time; "
        f"ranks wait {timeline.idle:.1%} of a step"
    ]
    rows = []
    for position, own in enumerate(schedule):
        layers = [str(split[stage]) for stage in range(position, stages, ranks)] if split else []
        rows.append(
            [
                stages_of(position, ranks, chunks),
                f"{' + '.join(layers)} layers" if layers else "",
                f"works {timeline.busy[position] / timeline.total:.0%}",
                f"keeps {timeline.kept[position] / chunks:g} of {count(micro_batches, 'micro-batch')}",
                f"= {most_kept(own, shares):.2f} × one micro-batch in all layers",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True) if width]
        lines.append("  ".join(cells).rstrip())
    return lines


def schedule_lines(
    name: str,
    ranks: int,
    chunks: int,
    micro_batches: int,
    split: Sequence[int] = (),
    forward: Sequence[float] = (),
    backward: Sequence[float] = (),
) -> list[str]:
    """What the dry run says of a pipeline.

    `split`: the layers of each stage. `forward`, `backward`: what each stage costs; without them, all layers cost the
    same, and nothing else does.

    Raises:
        ConfigError: there is no such schedule.
    """
    schedule = make_schedule(name, ranks, chunks, micro_batches)
    forward = forward or split
    timeline = simulate(schedule, forward, backward or [2.0 * cost for cost in forward])
    notice = schedule_notice(ranks, micro_batches)
    return [*describe(name, schedule, timeline, split), *([notice] if notice else [])]
