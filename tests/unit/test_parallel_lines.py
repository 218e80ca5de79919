"""What a dry run states of the axes, for Llama 3 8 B by hand."""

import dataclasses

import pytest

from recipes.language_modeling.model import Transformer
from shardwise.plan import Plan
from shardwise.plan.parallel_lines import count_decoder, parallel_lines
from shardwise.plan.topology import Topology
from tests.unit.test_plan import plan

LLAMA = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14336, "vocab_size": 128256}


def laid_out(topology: Topology, micro_batches: int, **changes: object) -> Plan:
    made = dataclasses.replace(plan(), topology=topology, accumulate_grad_batches=micro_batches, micro_batch_size=1)
    made = dataclasses.replace(made, module={"model": LLAMA}, data={"sequence_length": 8192})
    return dataclasses.replace(made, **changes)


def test_the_parameters_are_those_of_the_recipes_model() -> None:
    assert count_decoder(LLAMA) == 8_030_261_248
    small = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 65}
    for tied in (False, True):
        sizes = {**small, "tie_embeddings": tied}
        assert count_decoder(sizes) == Transformer(max_seq_len=8, **sizes).count_parameters()


def test_a_run_without_these_axes_states_nothing() -> None:
    assert parallel_lines(laid_out(Topology(1, 8, 1, 8), 8)) == []


def test_what_each_axis_sends_is_stated() -> None:
    lines = parallel_lines(laid_out(Topology(1, 8, 1, 2, tensor=2, pipeline=2), 8))
    assert lines[0].startswith("1f1b, 2 ranks × 1 stage, 8 micro-batches a step: bubble 12.5%")
    compute = {"bfloat16": 2, "float32": 4}[plan().precision.compute_dtype]
    row = 8192 * 4096 * compute / 1e9
    # Pipeline 2 · 8 / 2 rows, of which each of two stages sends half; tensor 8 · 16 layers · 8 / 2 rows;
    # FSDP half of a quarter of 8 B, 16 times gathered and 8 times scattered in fp32
    fsdp = 8.030261248 / 4 / 2 * (16 * compute + 8 * 4)
    assert f"pipeline {4 * row:.3g} GB, tensor {512 * row:.3g} GB, fsdp {fsdp:.3g} GB" in lines[3]
    assert lines[4].endswith(f"{16 * 8.030261248 / 8:.3g} GB")


@pytest.mark.parametrize(("method", "rows"), [("heads", 2 * 2.5 / 2), ("keys", 2 * 0.5)])
def test_context_is_stated_as_it_is_done_beside_the_other_axes(method: str, rows: float) -> None:
    """Of 16 layers and 8 micro-batches, a row for each: queries and results count 2, keys and values 2 · 8 / 32."""
    strategy = dataclasses.replace(plan().strategy, context_parallel_method=method)
    topology = Topology(1, 8, 1, 1, context=2, tensor=2, pipeline=2)
    lines = parallel_lines(laid_out(topology, 8, strategy=strategy))
    compute = {"bfloat16": 2, "float32": 4}[plan().precision.compute_dtype]
    row = 8192 * 4096 * compute / 1e9
    sent = 16 * 8 * rows / 2 / 2 * row  # a tensor rank has half of the heads, and half of all is sent
    assert f"pipeline {2 * row:.3g} GB, context by {method} {sent:.3g} GB, tensor {256 * row:.3g} GB, fsdp " in lines[3]
    assert lines[4].endswith(f"{16 * 8.030261248 / 8:.3g} GB")


@pytest.mark.parametrize("changes", [{"module": {}}, {"data": None}, {"module": {"model": {"dim": 4}}}])
def test_a_model_of_unknown_size_is_told(changes: dict[str, object]) -> None:
    lines = parallel_lines(laid_out(Topology(1, 2, 1, 1, pipeline=2), 4, **changes))
    assert lines[0].startswith("1f1b, 2 ranks") and lines[-1].startswith("bytes are not stated")
