"""What goes with a pipeline, and how layers are cut into its stages by what they weigh and cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import fsum, inf
from typing import Any

from shardwise.config.groups import FsdpConfig
from shardwise.config.schema import RunConfig, as_yaml
from shardwise.errors import ConfigError, count
from shardwise.plan.pipeline_schedule import check_schedule
from shardwise.plan.plan import Plan
from shardwise.plan.topology import Topology
from shardwise.protocols import optional

# What goes with a pipeline, and what does not.


def check_pipeline(config: RunConfig, topology: Topology, accumulate: int) -> None:
    """Refuse options of a pipeline without one, and what a pipeline cannot do.

    Raises:
        ConfigError
    """
    strategy = config.strategy
    if not isinstance(strategy, FsdpConfig):
        return
    if topology.pipeline == 1:
        _check_without(strategy)
        return
    size = f"strategy.pipeline_parallel_size={topology.pipeline}"
    schedule, chunks = strategy.pipeline_schedule, strategy.pipeline_chunks
    check_schedule(schedule, topology.pipeline, chunks, accumulate if config.stage == "fit" else topology.pipeline)
    if strategy.pipeline_split is not None:
        stages = topology.pipeline * chunks
        if len(strategy.pipeline_split) != stages or min(strategy.pipeline_split) < 1:
            raise ConfigError(
                f"strategy.pipeline_split={list(strategy.pipeline_split)}: must have {stages} numbers "
                f"(pipeline_parallel_size * pipeline_chunks), each at least 1: how many layers each stage has"
            )
    cannot = {
        "compile=model: a stage is a part of the model; use compile=layer": config.compile.name == "model",
        "stage=predict: a rank without the last stage has no predictions; leave strategy.pipeline_parallel_size out":
            config.stage == "predict",
        "find_learning_rate=true is not supported in a pipeline yet; find it without one": config.find_learning_rate,
        "quick_check=true runs predict, which a pipeline cannot; leave it out": config.quick_check,
    }  # fmt: skip
    for why, given in cannot.items():
        if given:
            raise ConfigError(f"{size} with {why}")


def check_stages(plan: Plan, module_class: Any) -> tuple[Plan, str | None]:
    """Refuse a module that runs more than once through its layers in a step, or has too few layers.

    Returns:
        The Plan without the module's options that take several passes, and a line about them for the user.

    Raises:
        ConfigError
    """
    if plan.topology.pipeline == 1:
        return plan, None
    line, find = None, optional(module_class, "several_passes")
    passes = None if find is None else find(plan.module)
    if passes is not None:
        line = (
            f"strategy.pipeline_parallel_size={plan.topology.pipeline}: a pipeline makes one pass through the layers "
            f"in a step, and generating text takes many; "
        )
        if isinstance(passes, str):
            raise ConfigError(line + passes)
        line += f"it is left out ({' '.join(f'module.{key}={as_yaml(value)}' for key, value in passes.items())})"
        plan = dataclasses.replace(plan, module=plan.module | passes)
    if plan.units is None and (decoder := decoder_of(plan)) is not None:
        decoder.split(plan)
    return plan, line


def _check_without(strategy: FsdpConfig) -> None:
    for word, default in (("pipeline_schedule", "1f1b"), ("pipeline_chunks", 1), ("pipeline_split", None)):
        if (value := getattr(strategy, word)) != default:
            raise ConfigError(
                f"strategy.{word}={value}: there is no pipeline; add strategy.pipeline_parallel_size=2, say, or leave "
                f"it out"
            )


# Cuts a model's layers into the stages of a pipeline, so that the slowest stage is as fast as it can be.

_ROUNDING = 1 + 1e-9


def split_units(costs: Sequence[float], stages: int, before: float = 0.0, behind: float = 0.0) -> tuple[int, ...]:
    """The number of consecutive units of each stage.

    The largest cost of a stage is as small as it can be, for every micro-batch waits for that stage. Among the cuts
    that share it, the costs of the stages are as even as they can be; then earlier stages get more units.

    Args:
        costs: the cost of each unit, in any unit of work, such as FLOPs of a forward and a backward.
        stages: the number of stages; each gets a unit at least.
        before: the cost of what stands before the units, on the first stage.
        behind: the cost of what stands behind them, such as the head, on the last stage.

    Raises:
        ConfigError: fewer units than stages.
    """
    if len(costs) < stages:
        raise ConfigError(
            f"{count(len(costs), 'layer')} cannot be cut into {count(stages, 'stage')} (pipeline_parallel_size * "
            f"pipeline_chunks): use at most {count(len(costs), 'stage')}"
        )
    sums = [0.0, *accumulate(costs)]

    def cost(begin: int, end: int) -> float:
        ends = (before if begin == 0 else 0.0) + (behind if end == len(costs) else 0.0)
        return sums[end] - sums[begin] + ends

    largest = [inf] * len(costs) + [0.0]  # of the units from i on, cut into the stages so far
    for _ in range(stages):
        largest = [
            min((max(cost(i, j), largest[j]) for j in range(i + 1, len(costs) + 1)), default=inf)
            for i in range(len(costs) + 1)
        ]
    bound = largest[0] * _ROUNDING
    squares, ways = [inf] * len(costs) + [0.0], []
    for _ in range(stages):
        found = [_most_even(cost, squares, i, bound) for i in range(len(costs) + 1)]
        squares = [square for square, _ in found]
        ways.append([end for _, end in found])
    split, begin = [], 0
    for ends in reversed(ways):
        split.append(ends[begin] - begin)
        begin = ends[begin]
    return tuple(split)


def _most_even(
    cost: Callable[[int, int], float], squares: Sequence[float], begin: int, bound: float
) -> tuple[float, int]:
    """The smallest sum of squares from unit `begin` on, and where its first stage ends."""
    best, end = inf, begin
    for j in range(begin + 1, len(squares)):
        stage = cost(begin, j)
        if stage <= bound and stage**2 + squares[j] <= best * _ROUNDING:
            best, end = stage**2 + squares[j], j
    return best, end


def stage_costs(
    split: Sequence[int], costs: Sequence[float], before: float = 0.0, behind: float = 0.0
) -> tuple[float, ...]:
    """The cost of each stage of a split, with what stands before the units and behind them."""
    ends = [0, *accumulate(split)]
    own = [fsum(costs[begin:end]) for begin, end in pairwise(ends)]
    own[0] += before
    own[-1] += behind
    return tuple(own)


def check_split(split: Sequence[int], units: int, stages: int) -> tuple[int, ...]:
    """`split`, unless it leaves a unit or a stage out.

    Raises:
        ConfigError: another number of stages, a stage without units, another sum than there are units, or fewer
            units than stages.
    """
    if len(split) == stages and min(split) > 0 and sum(split) == units:
        return tuple(split)
    fitting = ",".join(map(str, split_units([1.0] * units, stages)))
    raise ConfigError(
        f"pipeline_split=[{','.join(map(str, split))}] must have {count(stages, 'number')} (pipeline_parallel_size * "
        f"pipeline_chunks), each at least 1, with a sum of {units}, the model's layers; it has {len(split)} with a sum "
        f"of {sum(split)}; use for instance [{fitting}], or leave it out"
    )


# The sizes of a decoder as a config says them: what its layers weigh, and what they cost. No torch here.

SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")


@dataclass(frozen=True)
class Decoder:
    """A decoder with grouped queries, gated layers and no biases, such as the recipe's."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    tied: bool
    tokens: int  # of a sequence

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of the matrices of a layer."""
        head = self.dim // self.n_heads
        keys = (self.n_kv_heads * head, self.dim)
        queries = (self.n_heads * head, self.dim)
        wide = (self.ffn_dim, self.dim)
        return [queries, keys, keys, queries[::-1], wide, wide, wide[::-1]]

    @property
    def layer_parameters(self) -> int:
        return sum(rows * columns for rows, columns in self.matrices) + 2 * self.dim

    @property
    def table(self) -> int:
        """The parameters of the embedding; the head has as many."""
        return self.vocab_size * self.dim

    @property
    def parameters(self) -> int:
        return self.n_layers * self.layer_parameters + (1 if self.tied else 2) * self.table + self.dim

    @property
    def layer_flops(self) -> int:
        """Of the forward of one sequence through a layer: 2 a weight and token, and attention's two products.

        Position t looks at t + 1 positions. Of packed documents attention costs less, which is not known here.
        """
        weights = self.layer_parameters - 2 * self.dim
        return 2 * weights * self.tokens + 2 * 2 * self.dim * (self.tokens * (self.tokens + 1) // 2)

    @property
    def head_flops(self) -> int:
        """Of the forward of one sequence through the head. The embedding is looked up, and costs nothing."""
        return 2 * self.table * self.tokens

    def costs(self, plan: Plan) -> tuple[list[float], float]:
        """What each layer and the head cost in a step, forward and backward.

        A backward counts as two forwards; what is checkpointed runs forward once more.
        """
        return [(3 + recomputed(plan)) * self.layer_flops] * self.n_layers, 3.0 * self.head_flops

    def split(self, plan: Plan) -> tuple[int, ...]:
        """How many layers each stage of the Plan's pipeline has; one stage has all where there is none.

        Raises:
            ConfigError: there are fewer layers than stages, or pipeline_split has another number of them.
        """
        stages = plan.topology.pipeline * plan.strategy.pipeline_chunks
        if plan.strategy.pipeline_split is not None:
            return check_split(plan.strategy.pipeline_split, self.n_layers, stages)
        layers, head = self.costs(plan)
        return split_units(layers, stages, behind=head)


def recomputed(plan: Plan) -> float:
    """The share of a layer's forward that its backward computes again. `selective` keeps what costs most."""
    checkpointing = plan.activation_checkpointing
    return 1 / checkpointing.every_n_layers if checkpointing.name == "full" else 0.0


def decoder_of(plan: Plan) -> Decoder | None:
    """The decoder whose sizes the config names, with the length of its sequences; None: it does not name all."""
    model: Any = plan.module.get("model")
    tokens: Any = (plan.data or {}).get("sequence_length")
    if not isinstance(model, Mapping) or not _is_size(tokens) or not all(_is_size(model.get(name)) for name in SIZES):
        return None
    return Decoder(**{name: model[name] for name in SIZES}, tied=bool(model.get("tie_embeddings")), tokens=tokens)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and value > 0
