"""What a dry run states of the axes, for Llama 3 8 B by hand and for small models against real optimizers."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.harness.state_memory import FILE, state_of
from recipes.language_modeling.model import Transformer
from shardwise.config.compose import compose
from shardwise.config.groups import ActivationCheckpointingConfig, ClusterConfig, FsdpConfig
from shardwise.errors import ConfigError
from shardwise.optim.adamw import AdamW8bit, AdamWBf16
from shardwise.optim.matrices import choose_matrices, muon_groups
from shardwise.optim.muon import Muon
from shardwise.plan import Plan
from shardwise.plan.parallel_costs import bytes_sent, explain_memory, parallel_lines, state_bytes_of_rank
from shardwise.plan.pipeline import Decoder, decoder_of
from shardwise.plan.topology import Topology
from tests.unit.test_plan import plan

LLAMA = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14336, "vocab_size": 128256}
SMALL = {"dim": 128, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96, "vocab_size": 65}
ROW = 8192 * 4096


def laid_out(topology: Topology, micro_batches: int, **changes: object) -> Plan:
    made = dataclasses.replace(plan(), topology=topology, accumulate_grad_batches=micro_batches, micro_batch_size=1)
    made = dataclasses.replace(made, strategy=FsdpConfig())
    made = dataclasses.replace(made, module={"model": LLAMA}, data={"sequence_length": 8192})
    return dataclasses.replace(made, **changes)


def decoder(plan: Plan) -> Decoder:
    found = decoder_of(plan)
    assert found is not None
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_and_flops_are_those_of_the_recipes_model(tied: bool) -> None:
    sizes = {**SMALL, "tie_embeddings": tied}
    model = Transformer(max_seq_len=8, **sizes)
    found = decoder(laid_out(Topology(1, 1, 1, 1), 1, module={"model": sizes}, data={"sequence_length": 8}))
    assert found.parameters == model.count_parameters()
    assert 3 * (found.n_layers * found.layer_flops + found.head_flops) == model.training_flops(1, 8)


def test_the_parameters_of_8b() -> None:
    assert decoder(laid_out(Topology(1, 1, 1, 1), 1)).parameters == 8_030_261_248


@pytest.mark.parametrize(
    ("tokens", "checkpointing", "split"),
    [
        (8192, ActivationCheckpointingConfig(), (9, 9, 8, 6)),  # the head is 2.09 layers, by its weights 2.41
        (131072, ActivationCheckpointingConfig(), (8, 8, 8, 8)),  # it is 0.7: attention costs more than all weights
        (8192, ActivationCheckpointingConfig("full"), (9, 8, 8, 7)),  # layers run forward twice, the head once
    ],
)
def test_layers_are_cut_by_what_they_cost_over_this_length(
    tokens: int, checkpointing: ActivationCheckpointingConfig, split: tuple[int, ...]
) -> None:
    made = laid_out(Topology(1, 4, 1, 1, pipeline=4), 32, data={"sequence_length": tokens})
    made = dataclasses.replace(made, activation_checkpointing=checkpointing)
    assert decoder(made).split(made) == split
    given = dataclasses.replace(made, strategy=dataclasses.replace(made.strategy, pipeline_split=(5, 9, 9, 9)))
    assert decoder(given).split(given) == (5, 9, 9, 9)


def test_a_run_without_these_axes_states_nothing() -> None:
    assert parallel_lines(laid_out(Topology(1, 8, 1, 8), 8)) == []


def test_a_model_that_no_gpu_of_the_cluster_holds_is_told_so() -> None:
    h100, adamw = ClusterConfig(name="mine", gpu_memory_gib=80), {"_target_": "torch.optim.AdamW"}
    sharded, whole = (
        laid_out(Topology(1, 8, *sizes), 8, optimizer=adamw, accelerator="cuda") for sizes in ((1, 8), (8, 1))
    )
    [told] = explain_memory(whole, h100)
    assert "of a rank take 120 GiB, and a GPU of cluster=mine has 80 GiB; strategy=fsdp" in told
    zero = dataclasses.replace(whole, strategy=dataclasses.replace(whole.strategy, name="zero1"))
    frozen = dataclasses.replace(whole, freeze=("layers",))
    for made in (sharded, zero, frozen, dataclasses.replace(whole, accelerator="cpu")):
        assert not explain_memory(made, h100)
    assert not explain_memory(whole, ClusterConfig())


def test_what_each_axis_sends_is_stated() -> None:
    """In 16 bits, reduced in fp32."""
    precision = dataclasses.replace(plan().precision, compute_dtype="bfloat16", reduce_dtype="float32")
    made = laid_out(Topology(1, 8, 1, 2, tensor=2, pipeline=2), 8, precision=precision)
    lines, sent = parallel_lines(made), bytes_sent(made, decoder(made))
    assert lines[0].startswith("1f1b, 2 ranks × 1 stage, 8 micro-batches a step: bubble 12.7%")
    assert "17 layers" in lines[1] and "15 layers" in lines[2]
    assert lines[3] == "the head costs as much as 2.09 layers"
    # 2 · 8 / 2 rows, of which each of two stages sends half
    assert sent["pipeline"] == pytest.approx(2 * 4 * ROW)
    # 8 · 16 layers · 8 / 2 rows; a scatter, a gather and both again at the ends, each of half a row, on one of two
    # stages; three numbers a token are all-reduced
    assert sent["tensor"] == pytest.approx(2 * 8 * (64 * ROW + (4 * ROW + 6 * 8192) / 2 / 2))
    # Half of a quarter of 8 B, 16 times gathered and 8 times scattered
    assert sent["fsdp"] == pytest.approx(8_030_261_248 / 4 / 2 * (16 * 2 + 8 * 4))
    assert "on average over the stages: pipeline 0.268 GB, tensor " in lines[4]


@pytest.mark.parametrize(("pipeline", "gathers"), [(1, 8), (2, 1)])
def test_weights_that_stay_gathered_travel_less_often(pipeline: int, gathers: int) -> None:
    """From the forward pass to the backward pass of a micro-batch; in a pipeline from the first one to the last."""
    made = laid_out(Topology(1, 8, 1, 4 // pipeline, tensor=2, pipeline=pipeline), 8)
    kept = dataclasses.replace(made, strategy=dataclasses.replace(made.strategy, reshard_after_forward=False))
    usual, less = (bytes_sent(one, decoder(one))["fsdp"] for one in (made, kept))
    shards, whole = 4 // pipeline, 8_030_261_248 / 2 / pipeline
    assert usual - less == pytest.approx(4 * whole * (1 - 1 / shards) * (16 - gathers))


def test_a_shared_weight_is_on_both_ends_whose_gradients_are_summed() -> None:
    tied = {"model": {**LLAMA, "tie_embeddings": True}}
    untied, shared = (laid_out(Topology(1, 4, 1, 1, pipeline=4), 8, **more) for more in ({}, {"module": tied}))
    table = 128256 * 4096
    assert decoder(untied).parameters - decoder(shared).parameters == table
    assert state_bytes_of_rank(shared, decoder(shared)) == state_bytes_of_rank(untied, decoder(untied))
    more = [bytes_sent(made, decoder(made))["pipeline"] for made in (shared, untied)]
    assert more[0] - more[1] == pytest.approx(4 * 2 * table / 4)  # fp32, two of four stages


def test_norms_are_whole_on_tensor_ranks_and_deferred_gradients_are_unsharded() -> None:
    made = laid_out(Topology(1, 8, 1, 4, tensor=2), 8, optimizer={"_target_": "torch.optim.AdamW"})
    norms = 65 * 4096
    [found] = state_bytes_of_rank(made, decoder(made))
    assert found == pytest.approx(16 / 4 * ((8_030_261_248 - norms) / 2 + norms))
    deferred = dataclasses.replace(made, strategy=dataclasses.replace(made.strategy, defer_gradient_sync=True))
    [more] = state_bytes_of_rank(deferred, decoder(deferred))
    assert more - found == pytest.approx(4 * ((8_030_261_248 - norms) / 2 + norms))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("word", ["adamw", "adamw_bf16", "adamw_8bit", "muon", "sgd", "sgd optimizer.momentum=0"])
def test_the_state_is_that_of_the_optimizer(word: str, dtype: str) -> None:
    """Counted after a step of the real one, without the counts of steps."""
    [job] = compose([f"optimizer={word.split()[0]}", *word.split()[1:], "devices=1"]).jobs
    precision = dataclasses.replace(plan().precision, parameter_dtype=dtype)
    changes = {"module": {"model": SMALL}, "data": {"sequence_length": 8}, "precision": precision}
    made = laid_out(Topology(1, 1, 1, 1), 1, optimizer=job.config.optimizer, **changes)
    model = Transformer(max_seq_len=8, **SMALL).to(getattr(torch, dtype))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = optimizer_of(word, model)
    optimizer.step()
    kept = [t for state in optimizer.state.values() for key, t in state.items() if key != "step" and t is not None]
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *kept]
    [stated] = state_bytes_of_rank(made, decoder(made))
    assert stated == sum(t.numel() * t.element_size() for t in tensors)
    assert f"the state of {word.split()[0]} of a rank" in parallel_lines(dataclasses.replace(
        made, topology=Topology(1, 2, 1, 1, tensor=2)))[-1]  # fmt: skip


def optimizer_of(word: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if word == "muon":
        chosen = choose_matrices(model, list(model.blocks), "layers")
        own = [p for name, p in model.named_parameters() if name in chosen]
        return Muon(muon_groups([{"params": parameters}], own))
    if word.startswith("sgd"):
        return torch.optim.SGD(parameters, momentum=0.0 if "=0" in word else 0.9)
    made = {"adamw": torch.optim.AdamW, "adamw_bf16": AdamWBf16, "adamw_8bit": AdamW8bit}[word]
    return made(parameters)  # type: ignore[no-any-return]


def test_state_that_is_not_known_is_not_stated() -> None:
    lines = parallel_lines(laid_out(Topology(1, 2, 1, 1, tensor=2), 8, optimizer=None))
    assert lines[-1] == f"weights and gradients, without optimizer state, of a rank: {8 * 8.030261248 / 2:.3g} GB"


@pytest.mark.parametrize(("method", "rows"), [("heads", 2 * 2.5 / 2), ("keys", 2 * 0.5)])
def test_context_is_stated_as_it_is_done_beside_the_other_axes(method: str, rows: float) -> None:
    """Of 16 layers and 8 micro-batches, a row for each: queries and results count 2, keys and values 2 · 8 / 32."""
    strategy = dataclasses.replace(FsdpConfig(), context_parallel_method=method)
    made = laid_out(Topology(1, 8, 1, 1, context=2, tensor=2, pipeline=2), 8, strategy=strategy)
    sent = bytes_sent(made, decoder(made))
    compute = {"bfloat16": 2, "float32": 4}[plan().precision.compute_dtype]
    # A tensor rank has half of the heads, and half of all is sent
    assert sent[f"context by {method}"] == pytest.approx(compute * 16 * 8 * rows / 2 / 2 * ROW)
    assert sent["pipeline"] == pytest.approx(compute * 2 * ROW)
    assert list(sent) == ["pipeline", f"context by {method}", "tensor", "fsdp"]
    assert f"context by {method} {sent[f'context by {method}'] / 1e9:.3g} GB" in parallel_lines(made)[-2]


@pytest.mark.parametrize(
    ("pipeline", "given", "message"),
    [
        (64, None, "32 layers cannot be cut into 64 stages"),
        (2, (16, 8), "with a sum of 32, the model's layers; it has"),
    ],
)
def test_layers_that_cannot_be_cut_so_are_refused(pipeline: int, given: tuple[int, ...] | None, message: str) -> None:
    strategy = dataclasses.replace(FsdpConfig(), pipeline_split=given)
    with pytest.raises(ConfigError, match=message):
        parallel_lines(laid_out(Topology(1, pipeline, 1, 1, pipeline=pipeline), 8, strategy=strategy))


@pytest.mark.parametrize("changes", [{"module": {}}, {"data": None}, {"module": {"model": {"dim": 4}}}])
def test_a_model_of_unknown_size_is_told(changes: dict[str, object]) -> None:
    lines = parallel_lines(laid_out(Topology(1, 2, 1, 1, pipeline=2), 4, **changes))
    assert lines[0].startswith("1f1b, 2 ranks") and lines[-1].startswith("bytes are not stated")


def test_what_a_benchmark_finds_on_each_gpu_is_set_beside_what_is_stated(tmp_path: Path) -> None:
    """Rank 0 has the last layers. Of a run on a CPU nothing is found."""
    made = laid_out(Topology(1, 2, 1, 1, pipeline=2), 8)
    assert not state_of(tmp_path, made)
    for rank in (0, 1):
        (tmp_path / FILE.format(rank)).write_text(str(rank + 7))
    assert state_of(tmp_path, made) == {"allocated": [7, 8], "stated": state_bytes_of_rank(made, decoder(made))[::-1]}
