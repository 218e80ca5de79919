"""Shows a pipeline's schedule as a table: the work, idle time and activations of each rank."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.errors import count
from shardwise.plan.pipeline_schedule import (
    Schedule,
    Timeline,
    make_schedule,
    most_kept,
    schedule_notice,
    simulate,
)


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
