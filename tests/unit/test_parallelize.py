"""`compile=` and `activation_checkpointing=` change speed and memory and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.config.compose import compose
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.units import find_units
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan


class Block(nn.Module):
    """Attention and a feed-forward part, BatchNorm and dropout in it: what goes wrong when a layer runs twice."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.Linear(16, 48)
        self.norm, self.batch_norm = nn.LayerNorm(16), nn.BatchNorm1d(16)
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)
        self.dropout = nn.Dropout(dropout)
        self.runs: list[None] = []  # a list, since a number is put back when the layer is computed again

    @property
    def calls(self) -> int:
        return len(self.runs)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.runs.append(None)
        q, k, v = self.attention(self.norm(x)).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.narrow(self.dropout(torch.nn.functional.gelu(self.wide(x))))
        return self.batch_norm(x.transpose(1, 2)).transpose(1, 2)


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(3)))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.blocks(self.embedding(tokens)).float() @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits.mT, tokens)


def plan_for(*words: str) -> Plan:
    argv = ["recipe=custom", "module._target_=a.B", "data._target_=a.C", "micro_batch_size=1", "global_batch_size=1",
            "max_steps=1", "accelerator=cpu"]  # fmt: skip
    return make_plan(compose([*argv, *words]).jobs[0].config, Host(cuda_devices=0, run_id="run"))


def prepared(model: Model, *words: str) -> Model:
    made = copy.deepcopy(model)
    parallelize(made, find_units(made, ["Block"]), plan_for(*words), copied=lambda p: True, casts_inputs=True)
    return made


def step(model: Model, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and buffers after one forward and backward pass, under the same random numbers."""
    torch.manual_seed(1)
    loss = model(tokens)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, dict(model.named_buffers())


def check_bit_equal(ours: Any, theirs: Any) -> None:
    assert torch.equal(ours[0], theirs[0])
    for mine, expected in zip(ours[1:], theirs[1:], strict=True):
        assert mine.keys() == expected.keys()
        for name, tensor in expected.items():
            assert mine[name].dtype == tensor.dtype, name
            assert torch.equal(mine[name], tensor), name


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(11, (4, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["full", "selective"])
@pytest.mark.parametrize("every", [1, 2])
def test_checkpointed_units_run_twice_and_give_the_same_bits(
    tokens: Tensor, precision: str, name: str, every: int
) -> None:
    """Dropout draws the same numbers again, and BatchNorm counts a micro-batch once."""
    torch.manual_seed(0)
    model = Model(dropout=0.3)
    plain = prepared(model, f"precision={precision}")
    words = [f"activation_checkpointing={name}", f"activation_checkpointing.every_n_layers={every}"]
    ours = prepared(model, f"precision={precision}", *words)
    for n in (1, 2):  # the second micro-batch of a window, on the statistics of the first
        check_bit_equal(step(ours, tokens), step(plain, tokens))
        assert [block.calls for block in plain.blocks] == [n] * 3
        assert [block.calls for block in ours.blocks] == ([2 * n] * 3 if every == 1 else [2 * n, n, 2 * n])
        assert ours.blocks[0].batch_norm.num_batches_tracked == n


def test_evaluation_is_not_recomputed(tokens: Tensor) -> None:
    torch.manual_seed(0)
    model = Model()
    plain, ours = prepared(model), prepared(model, "activation_checkpointing=full")
    step(ours, tokens), step(plain, tokens)
    ours.eval(), plain.eval()
    calls = ours.blocks[0].calls
    with torch.no_grad():
        assert torch.equal(ours(tokens), plain(tokens))
    assert ours.blocks[0].calls == calls + 1
    for (name, mine), (_, expected) in zip(ours.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(mine, expected), name


def saved_bytes(model: Model, tokens: Tensor) -> int:
    """What autograd keeps between forward and backward, the parameters left out."""
    own = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens)
    total = sum(kept.values())
    loss.backward()
    return total


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpointed_units_keep_their_inputs_alone(tokens: Tensor, precision: str) -> None:
    """The low-precision copies of the weights are among what is not kept."""
    torch.manual_seed(0)
    model = Model()
    plain = saved_bytes(prepared(model, f"precision={precision}"), tokens)
    ours = saved_bytes(prepared(model, f"precision={precision}", "activation_checkpointing=full"), tokens)
    inputs = tokens.numel() * 16 * 4
    bare = copy.deepcopy(model)
    bare.blocks = nn.Sequential()
    assert ours <= saved_bytes(bare, tokens) + 3 * inputs
    assert plain > 3 * ours


# What torch says to itself while it compiles
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("words", [[], ["activation_checkpointing=full"], ["activation_checkpointing=selective"]],
                         ids=["plain", "full", "selective"])  # fmt: skip
def test_compiled_units_give_the_same_numbers(tokens: Tensor, words: list[str]) -> None:
    """Three layers of one class are one graph. Inductor fuses, so bits may differ, and nothing more than bits."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Model()
    plain, ours = prepared(model), prepared(model, "compile=layer", *words)
    loss, gradients, buffers = step(plain, tokens)
    our_loss, our_gradients, our_buffers = step(ours, tokens)
    assert all(block.calls == 0 for block in ours.blocks), "nothing was compiled"
    torch.testing.assert_close(our_loss, loss, rtol=1e-6, atol=0)
    assert our_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert our_gradients[name].dtype == torch.float32
        # a bias before BatchNorm has a gradient of zero, which leaves its rounding
        assert (our_gradients[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, name
    for name, buffer in buffers.items():
        torch.testing.assert_close(our_buffers[name], buffer, rtol=1e-5, atol=1e-7, msg=name)
