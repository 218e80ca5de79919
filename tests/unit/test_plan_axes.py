"""Which sizes of the tensor, context and pipeline axes go together: what cannot be is one message from the Plan."""

from __future__ import annotations

import pytest

from recipes.language_modeling.module import LanguageModel
from shardwise.config.compose import compose
from shardwise.errors import ConfigError
from shardwise.plan import Host, Plan
from shardwise.plan.pipeline import check_stages
from shardwise.plan.resolve import make_plan

MODEL = ("data=token_shards data.directory=x module.sample_tokens=0 strategy=fsdp devices=8 model.n_heads=8 "
         "model.n_kv_heads=4 model.dim=64 model.ffn_dim=64 model.vocab_size=64 model.max_seq_len=16 "
         "data.sequence_length=16 global_batch_size=16 micro_batch_size=1")  # fmt: skip
WORDS = {"tp": "strategy.tensor_parallel_size", "cp": "strategy.context_parallel_size",
         "pp": "strategy.pipeline_parallel_size", "by": "strategy.context_parallel_method",
         "order": "strategy.pipeline_schedule", "chunks": "strategy.pipeline_chunks"}  # fmt: skip


def plan(words: str) -> Plan:
    """`tp=2` is short for `strategy.tensor_parallel_size=2`, and so on."""
    given = [f"{WORDS.get(key, key)}={value}" for key, value in (word.split("=", 1) for word in words.split())]
    return make_plan(compose([*MODEL.split(), *given]).jobs[0].config, Host(cuda_devices=8, run_id="made-up"))


@pytest.mark.parametrize(
    ("words", "mesh", "method"),
    [
        ("tp=2 cp=2", {"replicate": 1, "shard": 2, "context": 2, "tensor": 2}, "heads"),
        ("tp=4 cp=2", {"replicate": 1, "shard": 1, "context": 2, "tensor": 4}, "keys"),
        ("tp=2 cp=2 by=keys compile=model", {"replicate": 1, "shard": 2, "context": 2, "tensor": 2}, "keys"),
        ("tp=2 cp=2 pp=2", {"pipeline": 2, "replicate": 1, "shard": 1, "context": 2, "tensor": 2}, "heads"),
        ("cp=4 pp=2", {"pipeline": 2, "replicate": 1, "shard": 1, "context": 4}, "heads"),
        ("tp=2 strategy=fsdp_hybrid strategy.shard_size=2", {"replicate": 2, "shard": 2, "tensor": 2}, None),
        ("pp=2 strategy=fsdp_hybrid strategy.shard_size=2", {"pipeline": 2, "replicate": 2, "shard": 2}, None),
    ],
)
def test_axes_go_together(words: str, mesh: dict[str, int], method: str | None) -> None:
    made = plan(words)
    assert made.topology.mesh == mesh and made.strategy.context_parallel_method == method


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tp=2 cp=2 pp=4", r"pipeline_parallel_size=4 = 16 does not divide nodes \* devices = 1 \* 8 = 8; the product"),
        ("tp=4 cp=2 by=heads", r"context_parallel_size=2 \* strategy.tensor_parallel_size=4 does not divide the "
         "model's 4 key heads; use strategy.context_parallel_method=keys"),
        ("tp=2 cp=2 data.sequence_length=14", r"tensor_parallel_size=2 \* strategy.context_parallel_size=2 = 4 does "
         "not divide data.sequence_length=14; use a multiple of 4, such as data.sequence_length=12"),
        ("tp=8 cp=1", "tensor_parallel_size=8 does not divide model.n_kv_heads=4; use one of"),
        ("tp=2 cp=2 pp=2 order=interleaved chunks=2 global_batch_size=3", "there are 3; use 2 or 4 of them"),
        ("tp=2 cp=2 stage=predict", "stage=predict"),
        ("strategy=fsdp_hybrid tp=2 cp=2 strategy.shard_size=4", "strategy.shard_size=4 does not divide"),
    ],
)  # fmt: skip
def test_what_cannot_go_together_is_one_message(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(words)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
def test_other_strategies_have_none_of_these_axes(strategy: str, axis: str) -> None:
    with pytest.raises(ConfigError, match=f"{WORDS[axis]}=2: .*strategy=fsdp or strategy=fsdp_hybrid has it"):
        plan(f"strategy={strategy} {axis}=2")


def test_a_pipeline_leaves_out_the_samples_and_says_so() -> None:
    for tokens in (200, 0):
        words = f"{MODEL} module.sample_tokens={tokens} strategy.pipeline_parallel_size=2 name=run"
        config = compose(words.split()).jobs[0].config
        found, line = check_stages(make_plan(config, Host(cuda_devices=8)), LanguageModel)
        assert found.module["sample_tokens"] == 0
        assert (line is None) == (tokens == 0)
        assert line is None or line.endswith("it is left out (module.sample_tokens=0)")
