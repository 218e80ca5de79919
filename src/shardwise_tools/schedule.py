"""Shows the schedule of a pipeline before there is a run: `shardwise schedule pipeline_parallel_size=4 …`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.plan.pipeline import check_split, split_units, stage_costs
from shardwise.plan.pipeline_schedule import describe, make_schedule, schedule_notice, simulate
from shardwise_tools import read_words

HELP = """\
usage: shardwise schedule [pipeline_parallel_size=4] [pipeline_schedule=1f1b] [micro_batches=8] [WORD=VALUE …]

The time that the ranks of a pipeline work and wait, and the activations that each of them keeps. Ranks stand in the
order of the layers. docs/parallelism.md

  pipeline_parallel_size=N       ranks of the pipeline
  pipeline_schedule=NAME         gpipe, 1f1b or interleaved
  pipeline_chunks=N              stages of each rank; interleaved has 2 or more
  micro_batches=N                of one step: global_batch_size / (micro_batch_size * data-parallel ranks)
  layers=N                       layers of the model; left out: all stages cost the same
  head_layers=X                  what the head costs, in layers: 2.4 for Llama 3 8 B. Stages are cut with it in mind
  pipeline_split=[9,9,8,6]       layers of each stage; left out: cut so that the slowest stage is as fast as it can be
  backward=2                     what a backward costs, in forwards; 3 with activation checkpointing

The words of a run are read too: strategy.pipeline_chunks=2.
"""


@dataclass
class Options:
    pipeline_parallel_size: int = 4
    pipeline_schedule: str = "1f1b"
    pipeline_chunks: int = 1
    micro_batches: int = 8
    layers: int | None = None
    head_layers: float = 0.0
    pipeline_split: str = ""
    backward: float = 2.0


def run(words: list[str]) -> None:
    """Print a schedule.

    Raises:
        ConfigError: there is no such schedule.
    """
    alone, options = read_words([word.removeprefix("strategy.") for word in words], Options)
    if alone:
        raise ConfigError(f"{alone[0]}: schedule takes words of the form key=value; --help lists them")
    if not 0 < options.backward < float("inf") or not 0 <= options.head_layers < float("inf"):
        raise ConfigError("backward must be above 0, head_layers 0 or above, and both finite")
    ranks, name = options.pipeline_parallel_size, options.pipeline_schedule
    schedule = make_schedule(name, ranks, options.pipeline_chunks, options.micro_batches)
    split, forward = _cut(options, ranks * options.pipeline_chunks)
    timeline = simulate(schedule, forward, [options.backward * cost for cost in forward])
    lines = describe(name, schedule, timeline, split)
    notice = schedule_notice(ranks, options.micro_batches)
    text = "\n".join([*lines, *([notice] if notice else [])])
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, "replace").decode(encoding))


def _numbers(text: str) -> tuple[int, ...]:
    """`[9,9,8,6]` → 9, 9, 8, 6."""
    try:
        return tuple(int(word) for word in text.removeprefix("[").removesuffix("]").split(",") if text)
    except ValueError:
        raise ConfigError(f"pipeline_split={text}: must be whole numbers, such as [9,9,8,6]") from None


def _cut(options: Options, stages: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The layers of each stage, none where the model is not known, and what its forward costs."""
    split = _numbers(options.pipeline_split)
    layers = options.layers if options.layers is not None else sum(split)
    if options.layers is None and not split:
        if options.head_layers:
            raise ConfigError(f"head_layers={options.head_layers:g} needs layers=N, of which it is counted")
        return (), (1.0,) * stages
    costs = [1.0] * layers
    if split:
        check_split(split, layers, stages)
    else:
        split = split_units(costs, stages, behind=options.head_layers)
    return split, stage_costs(split, costs, behind=options.head_layers)
