"""The sizes of a decoder as a config says them: what its layers weigh, and what they cost. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.plan.pipeline_split import check_split, split_units
from shardwise.plan.plan import Plan

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
