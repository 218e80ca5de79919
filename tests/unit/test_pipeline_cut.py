"""How a module that is there is cut into the stages of a pipeline: by FLOPs where they are known, else by weights."""

from __future__ import annotations

import dataclasses

import pytest
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from recipes.language_modeling.model import Transformer
from recipes.language_modeling.module import LanguageModel
from shardwise.config.compose import compose
from shardwise.errors import ConfigError
from shardwise.parallel.pipeline.stages import Ownership
from shardwise.parallel.units import find_units
from shardwise.plan import Host, Plan
from shardwise.plan.pipeline import decoder_of
from shardwise.plan.resolve import make_plan
from shardwise.strategies.pipelined_checks import check_module

SIZES = {"dim": 32, "n_layers": 8, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64, "vocab_size": 500}


def plan(tokens: int, *words: str) -> Plan:
    sizes = [f"model.{name}={size}" for name, size in {**SIZES, "max_seq_len": tokens}.items()]
    argv = ["strategy=fsdp", "devices=2", "strategy.pipeline_parallel_size=2", f"data.sequence_length={tokens}"]
    return make_plan(compose([*argv, *sizes, *words]).jobs[0].config, Host(cuda_devices=0, run_id="made-up"))


def cut(module: LightningModule, made: Plan) -> tuple[int, ...]:
    return check_module(module, find_units(module), made, 2)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tokens", "split"), [(8, (5, 3)), (2048, (4, 4))])
def test_attention_over_long_sequences_counts(tokens: int, split: tuple[int, ...], tied: bool) -> None:
    """The head has the weights of 1.7 layers, and costs 0.2 over 2,048 tokens. The dry run says the same."""
    module = LanguageModel(Transformer(max_seq_len=tokens, tie_embeddings=tied, **SIZES))
    made = plan(tokens)
    known = decoder_of(made)
    assert known is not None and cut(module, made) == known.split(made) == split
    assert cut(module, plan(tokens, "strategy.pipeline_split=[2,6]")) == (2, 6)


class Table(nn.Module):
    """A layer with an embedding of its own."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(rows, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Own(LightningModule):
    """Its first layers have large embeddings, and the config does not name its sizes."""

    def __init__(self, rows: list[int], head: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Table(rows) for rows in rows)
        self.head = nn.Linear(4, head)


def test_an_embedding_costs_nothing_and_a_head_what_it_multiplies() -> None:
    made = dataclasses.replace(plan(8), module={"_target_": "my.Own"})
    assert decoder_of(made) is None
    assert cut(Own([1000, 1000, 4, 4], 1), made) == (2, 2)
    assert cut(Own([4, 4, 4, 4], 8), made) == (3, 1)


def test_a_second_model_is_named() -> None:
    module = Own([4, 4], head=4)
    module.teacher = Own([4, 4], head=4)
    with pytest.raises(
        ConfigError, match=r"^Own: head is defined .* of which teacher.layers.0 is behind it: two stacks"
    ):
        Ownership(module, find_units(module), (2, 2), [0])
