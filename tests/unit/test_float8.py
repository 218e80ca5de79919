"""Which layers multiply in fp8, what such a product is, and what its backward pass keeps."""

from __future__ import annotations

import copy
import dataclasses
import json
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.decomposition import select_decomp_table
from torchao.float8 import Float8LinearConfig
from torchao.float8.config import e4m3_dtype
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole
from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

from shardwise.config.compose import compose
from shardwise.config.groups import Float8Config
from shardwise.errors import ConfigError
from shardwise.parallel.float8 import Float8Layers
from shardwise.plan import Host, Plan
from shardwise.plan.hardware import USUAL
from shardwise.plan.resolve import make_plan

RECIPES = ["tensorwise", "rowwise"]


def fp8(recipe: Any = "tensorwise", **changes: Any) -> Float8Config:
    return dataclasses.replace(Float8Config(recipe, ("head",), 32, emulate=True), **changes)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        self.tied = nn.Linear(64, 64, bias=False)
        self.tied.weight = self.embedding.weight
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)
        self.inner = nn.ModuleDict(
            {"gate_proj": nn.Linear(64, 64), "small": nn.Linear(64, 16), "odd": nn.Linear(64, 40)}
        )
        self.attention = nn.MultiheadAttention(64, 2)
        self.head = nn.Linear(64, 64)


def test_which_layers_multiply_in_fp8() -> None:
    model = Model()
    layers = Float8Layers(model, fp8(keep_in_bf16=("head", "*.gate_*")))
    assert layers.layers == [model.up, model.down]
    assert layers.kept == {
        "its weight is another layer's too": ["tied"],
        "keep_in_bf16": ["inner.gate_proj", "head"],
        "fewer than 32 inputs or outputs": ["inner.small"],
        "sizes that are no multiples of 16": ["inner.odd"],
        "computes in its own way": ["attention.out_proj"],
    }
    assert str(layers).startswith("fp8, tensorwise: 2 of 8 linear layers, ")
    assert "; in bf16: tied (its weight is another layer's too), 2 layers (keep_in_bf16), inner.small (" in str(layers)
    with pytest.raises(
        ConfigError, match="no linear layer of Model can multiply in fp8 .* lower precision.fp8.min_feat"
    ):
        Float8Layers(model, fp8(min_features=256))
    with pytest.raises(ConfigError, match=r"keep_in_bf16: haed is the name of no linear layer; .*did you mean head"):
        Float8Layers(model, fp8(keep_in_bf16=("haed",)))
    usual = planned(CPU, "precision=fp8", "precision.fp8.emulate=true").precision.fp8
    assert usual is not None and usual.keep_in_bf16 == USUAL


def test_where_ranks_divide_layers_the_sizes_are_those_of_a_part() -> None:
    model, parts = Model(), {"up": 0, "down": 1}
    assert Float8Layers(model, fp8(), parts, 4).layers[:2] == [model.up, model.down], "parts of 32"
    layers = Float8Layers(model, fp8(min_features=64), parts, 4)
    assert layers.kept["fewer than 64 inputs or outputs on a rank"] == ["up", "down"]
    with pytest.raises(ConfigError) as caught:
        Float8Layers(nn.Sequential(nn.Linear(48, 64)), fp8(min_features=16), {"0": 1}, 2)
    assert str(caught.value) == (
        "strategy.tensor_parallel_size=2 precision=fp8: 0 has 48 inputs, 24 on each rank, and products in fp8 take "
        "multiples of 16: use a multiple of 32, or name the layer in precision.fp8.keep_in_bf16"
    )
    kept = Float8Layers(nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 64)), fp8(keep_in_bf16=("0",)), {"0": 1}, 2)
    assert kept.kept == {"keep_in_bf16": ["0"]}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [(3, 5), (32,), (1,), (0, 4)])
def test_a_product_is_torchaos(recipe: str, rows: tuple[int, ...]) -> None:
    """Whatever the number of rows, of which the kernels take multiples of 16: the output and every gradient."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(64, 128))
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    theirs = Float8Linear.from_float(copy.deepcopy(ours[0]), config)
    Float8Layers(ours, fp8(recipe)).compute()
    x, gradient = torch.randn(*rows, 64).bfloat16().requires_grad_(), torch.randn(*rows, 128).bfloat16()
    out = ours(x)
    out.backward(gradient)
    assert out.dtype == torch.bfloat16 and out.shape == gradient.shape
    assert x.grad is not None and x.grad.shape == x.shape and ours[0].weight.grad.dtype == torch.float32
    if not x.numel():
        return
    again = x.detach().clone().requires_grad_()
    expected = theirs(again)
    expected.backward(gradient)
    assert torch.equal(out, expected) and again.grad is not None and torch.equal(x.grad, again.grad)
    assert torch.equal(ours[0].weight.grad, theirs.weight.grad) and torch.equal(ours[0].bias.grad, theirs.bias.grad)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_point_where_those_of_bf16_do(recipe: str) -> None:
    """By emulation, over a model of two layers: benchmarks/gpu_checks/fp8.py has the same on a GPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    plain = copy.deepcopy(model).bfloat16()
    Float8Layers(model, fp8(recipe)).compute()
    x = torch.randn(512, 64).bfloat16()
    target = torch.randn(512, 64)
    found = []
    for made in (model, plain):
        loss = nn.functional.mse_loss(made(x).float(), target)
        loss.backward()
        gradient = torch.cat([p.grad.float().flatten() for p in made.parameters() if p.grad is not None])
        found.append((loss.item(), gradient))
    (loss, gradient), (expected, expected_gradient) = found
    assert loss == pytest.approx(expected, rel=1e-3)
    assert torch.cosine_similarity(gradient, expected_gradient, dim=0) > 0.995
    assert float(gradient.norm()) == pytest.approx(float(expected_gradient.norm()), rel=0.02)


class Block(nn.Module):
    """As a Llama block is around its products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.w1, self.w3 = nn.Linear(64, 192, bias=False), nn.Linear(64, 192, bias=False)
        self.w2 = nn.Linear(192, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        out: Tensor = x + self.w2(nn.functional.silu(self.w1(hidden)) * self.w3(hidden))
        return out


def gathered_in_fp8(weight: Tensor) -> nn.Parameter:
    """A weight as FSDP2 gives it to a layer."""
    config = dataclasses.replace(Float8LinearConfig(), emulate=True)
    mm_config = Float8Linear(16, 16, config=config).linear_mm_config
    scale = amax_to_scale(weight.detach().abs().max(), e4m3_dtype)
    data = to_fp8_saturated(weight.detach() * scale, e4m3_dtype)
    role = GemmInputRole.WEIGHT
    return nn.Parameter(Float8TrainingTensor(data, scale, torch.bfloat16, mm_config, gemm_input_role=role))


def saved_by(block: nn.Module, x: Tensor) -> list[int]:
    """The sizes of the tensors that the compiled forward pass makes for the backward pass, as inductor cuts the two."""
    sizes: list[int] = []

    def look(graph: Any, _: Any) -> Any:
        made = [node for node in graph.graph.output_node().args[0][1:] if node.op != "placeholder"]
        sizes.extend(node.meta["val"].numel() for node in made if isinstance(node.meta["val"], Tensor))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=look,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )
    torch.compile(block, backend=backend, fullgraph=True)(x.requires_grad_()).sum().backward()
    return sizes


@pytest.mark.parametrize(
    ("kind", "known"),
    [("gathered in fp8", True), ("gathered in fp8", False), ("rowwise, gathered in bf16", True),
     ("rowwise, gathered in bf16", False), ("whole in fp32", True)],
)  # fmt: skip
def test_compiled_code_keeps_no_copy_of_a_weight_for_the_backward_pass(kind: str, known: bool) -> None:
    """The compiler's own partition of one layer: what leaves the forward graph besides its output.

    `known`: whether the compiler knows that parameters are there in the backward pass anyway.
    """
    torch._dynamo.reset()
    block = Block()
    layers = Float8Layers(block, fp8("rowwise" if "rowwise" in kind else "tensorwise"))
    layers.compute()
    block.norm.bfloat16()
    if "gathered" in kind:  # as fully_shard marks a layer: its weights come and go
        for layer in block.modules():
            layer._is_fsdp_managed_module = layer._fsdp_use_orig_params = True
    for layer in layers.layers:
        if kind == "gathered in fp8":
            layer.weight = gathered_in_fp8(layer.weight)
        elif kind == "rowwise, gathered in bf16":
            layer.weight = nn.Parameter(layer.weight.detach().bfloat16())
    with torch._functorch.config.patch(treat_parameters_as_free_to_save=known):
        kept = saved_by(block, torch.randn(160, 64).bfloat16())
    weights = {64 * 192, 192 * 64}
    assert [size for size in kept if size in weights] == [], kept


def test_layers_of_one_kind_share_their_graphs() -> None:
    """As compile=layer makes them: one graph for all, whatever layer comes."""
    torch._dynamo.reset()
    blocks = nn.Sequential(*(Block() for _ in range(3))).bfloat16()
    Float8Layers(blocks, fp8()).compute()
    counter = CompileCounterWithBackend("aot_eager")
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=counter)
        block(torch.randn(32, 64).bfloat16()).sum().backward()
    assert counter.frame_count == 1


def planned(host: Host, *words: str) -> Plan:
    argv = ["recipe=custom", "module._target_=a.B", "data._target_=a.C", "micro_batch_size=1", "global_batch_size=1",
            "max_steps=1", "devices=1", *words]  # fmt: skip
    return make_plan(compose(argv).jobs[0].config, host)


def test_the_plan_says_what_is_in_fp8() -> None:
    plan = planned(
        Host(1, run_id="r", gpu="NVIDIA H200", gpu_capability=(9, 0)), "precision=fp8", "strategy=fsdp",
        "precision.fp8.recipe=rowwise", "precision.fp8.keep_in_bf16=[head,w2]",
    )  # fmt: skip
    assert plan.precision.fp8 == Float8Config("rowwise", ("head", "w2"), 512, emulate=False)
    assert plan.peak_tflops is None and Plan.from_json(plan.to_json()) == plan
    raw = json.loads(plan.to_json())
    del raw["precision"]["fp8"]  # as it was written before
    assert Plan.from_json(json.dumps(raw)).precision.fp8 is None
    assert planned(Host(1, run_id="r"), "precision=fp8").precision.fp8 is not None, "the GPU is not known"


ADA, CPU = Host(1, run_id="r", gpu_capability=(8, 9)), Host(0, run_id="r")
AMPERE = Host(1, run_id="r", gpu="A100", gpu_capability=(8, 0))


@pytest.mark.parametrize(
    ("host", "words", "said"),
    [
        (
            AMPERE,
            "precision=fp8",
            "needs compute capability 8.9 or more (Ada, Hopper or newer), and the GPU is A100, "
            "which has 8.0; use precision=bf16",
        ),
        (
            Host(1, run_id="r", gpu="A100"),
            "precision=fp8",
            "the GPU is A100; use precision=bf16",
        ),  # a cluster's file says
        (CPU, "precision=fp8", "on the CPU use precision=bf16, or precision.fp8.emulate=true"),
        (ADA, "precision=fp8 strategy=zero2", "strategy=zero2 precision=fp8: fp8 is made of the fp32 weights"),
        (CPU, "precision=fp8 precision.fp8.emulate=true strategy=zero3", "use strategy=fsdp, or precision=bf16"),
        (ADA, "precision=fp8 precision.parameter_dtype=bfloat16", "fp8 keeps weights in float32"),
        (ADA, "precision=fp8 precision.compute_dtype=float32", "what is not in fp8 in bfloat16"),
        (ADA, "precision=fp8 precision.fp8.min_features=0", "precision.fp8.min_features=0: must be at least 1"),
        (ADA, "precision=fp8 precision.fp8=null", "precision=fp8 precision.fp8=null: use precision=fp8"),
        (ADA, "precision=fp8 precision.fp8.recipe=blockwise", "must be one of tensorwise, rowwise"),
        (ADA, "precision=fp8 precision.fp8.recipe=[rowwise]", "recipe=[rowwise]: must be one of tensorwise, rowwise"),
        (ADA, "precision=fp8 precision.fp8.keep=[head]", "precision.fp8 has no option keep"),
        (ADA, "precision=bf16 precision.fp8.recipe=rowwise", "precision.fp8"),
    ],
)
def test_where_fp8_cannot_be_had_it_is_refused(host: Host, words: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(host, *words.split())
    assert said in str(caught.value)
