"""What `activation_checkpointing=selective` keeps and what the backward pass computes again, also when compiled."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.callbacks.steps import Recompilations
from shardwise.config.compose import compose
from shardwise.errors import ConfigError
from shardwise.parallel.activation_checkpointing import explain, keep_results_of, without_caches
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.units import find_units
from shardwise.plan import Host
from shardwise.plan.resolve import make_plan

# What torch says to itself while it compiles
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
LAYERS = 4


class Layer(nn.Module):
    """Five matrix products with weights, of which the last one's result is needed by no gradient, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.wide, self.narrow = (
            nn.Linear(*size, bias=False) for size in ((16, 16), (16, 16), (16, 16), (16, 64), (64, 16))
        )
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(self.norm(x)).unflatten(-1, (2, 8)).transpose(1, 2) for w in (self.q, self.k, self.v))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.narrow(F.silu(self.wide(x)))


def prepared(make: Callable[[], nn.Module], *words: str, fresh: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    if fresh:
        torch._dynamo.reset()
    model = nn.Sequential(*(make() for _ in range(LAYERS)))
    argv = ["recipe=custom", "module._target_=a.B", "data._target_=a.C", "micro_batch_size=1", "global_batch_size=1",
            "max_steps=1", "accelerator=cpu", *words]  # fmt: skip
    plan = make_plan(compose(argv).jobs[0].config, Host(cuda_devices=0, run_id="run"))
    parallelize(model, find_units(model, [make().__class__.__name__]), plan, copied=lambda p: True, casts_inputs=True)
    return model


def batch() -> Tensor:
    return torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(1))


class Operations(TorchDispatchMode):
    """Counts operations by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function.name().partition("::")[2].partition(".")[0]] += 1
        return function(*args, **kwargs or {})


def backward_operations(*words: str) -> Counter[str]:
    """What the backward pass runs more than it does without checkpointing."""
    counts = []
    for more in ((), words):
        loss = prepared(Layer, *more)(batch()).square().sum()
        with Operations() as operations:
            loss.backward()
        counts.append(operations.counts)
    plain, ours = counts
    return Counter({name: ours[name] - plain[name] for name in ours | plain})


SELECTIVE = "activation_checkpointing=selective"
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def save(*words: str) -> str:
    return f"activation_checkpointing.save=[{','.join(words)}]"


@pytest.mark.parametrize(
    ("words", "products", "attention", "layers"),
    [
        (["activation_checkpointing=full"], 4, 1, LAYERS),
        ([SELECTIVE], 0, 0, LAYERS),
        ([SELECTIVE, "activation_checkpointing.every_n_layers=3"], 0, 0, 2),
        ([SELECTIVE, save("attention")], 4, 0, LAYERS),
        ([SELECTIVE, save("matmul")], 0, 1, LAYERS),
        ([SELECTIVE, save("aten.mm")], 0, 1, LAYERS),
        ([SELECTIVE, save("aten.mm.default")], 0, 1, LAYERS),
        ([SELECTIVE, save("every_second_matmul")], 2, 1, LAYERS),  # q, v and the last one are kept
    ],
)
def test_the_backward_pass_computes_again_what_is_not_kept(
    words: list[str], products: int, attention: int, layers: int
) -> None:
    """In one layer four products are needed again; what is cheap is computed again in every checkpointed layer."""
    more = backward_operations(*words)
    assert more["mm"] == products * layers
    assert more[ATTENTION] == attention * layers
    assert more["silu"] == layers and more["native_layer_norm"] == 3 * layers


def saved_bytes(model: nn.Module) -> int:
    """What autograd keeps between forward and backward, without parameters and the state of the random numbers."""
    own = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own and tensor.dtype != torch.uint8:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch()).square().sum()
    return sum(kept.values())


def test_a_compiled_layer_computes_again_only_what_a_gradient_needs() -> None:
    """Checkpointing is inside what is compiled: around it, all five products of a layer would run again."""
    products = {}
    for words in ([], ["activation_checkpointing=full"], [SELECTIVE]):
        for precision in ("fp32", "bf16"):
            model = prepared(Layer, "compile=layer", f"precision={precision}", *words)
            model(batch()).float().square().sum().backward()
            loss = model(batch()).float().square().sum()
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                loss.backward()
            counts = Counter(event.name for event in seen.events())
            products[" ".join(words), precision] = sum(counts[f"aten::{name}"] for name in ("mm", "addmm", "bmm"))
    plain = products["", "fp32"]
    assert plain == 10 * LAYERS
    for precision in ("fp32", "bf16"):
        assert products["", precision] == plain
        assert products["activation_checkpointing=full", precision] == plain + 4 * LAYERS
        assert products[SELECTIVE, precision] == plain


def test_low_precision_copies_are_not_kept_by_a_compiled_checkpointed_layer() -> None:
    inputs = LAYERS * batch().nbytes
    full = saved_bytes(prepared(Layer, "compile=layer", "precision=bf16", "activation_checkpointing=full"))
    assert full <= 1.5 * inputs < saved_bytes(prepared(Layer, "compile=layer", "precision=bf16"))


def test_a_memory_budget_reaches_the_compiler() -> None:
    sizes = [
        saved_bytes(prepared(Layer, "compile=layer", *words))
        for words in ([], ["compile.memory_budget=0.5"], ["compile.memory_budget=0.1"], [])
    ]
    assert sizes[0] == sizes[3] > sizes[1] > sizes[2]


def test_elementwise_results_are_computed_again_and_products_are_not() -> None:
    found = []
    for words in ([], ["compile.recompute_elementwise=true"]):
        model = prepared(Layer, "compile=layer", *words)
        kept = saved_bytes(model)
        model(batch()).square().sum().backward()  # compiles both passes
        loss = model(batch()).square().sum()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            loss.backward()
        counts = Counter(event.name for event in seen.events())
        products = sum(counts[f"aten::{name}"] for name in ("mm", "addmm", "bmm"))
        found.append((kept, products, [p.grad for p in model.parameters()]))
    (kept, products, gradients), (less, as_many, same) = found
    assert less < kept and as_many == products == 10 * LAYERS
    torch.testing.assert_close(same, gradients)


def test_a_second_run_of_a_process_does_not_use_the_graphs_of_the_first() -> None:
    """Its layers have the same code, and dynamo keeps what it has compiled of that."""
    words = ["compile.recompute_elementwise=true"], ["compile.memory_budget=0.3"], []
    first = saved_bytes(prepared(Layer, "compile=layer"))
    less, least, same = (saved_bytes(prepared(Layer, "compile=layer", *more, fresh=False)) for more in words)
    assert first == same > less and first > least != less


class Branching(Layer):
    """A layer that is not one graph: Python decides in the middle. It counts what a recomputation must not repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.statistics(x.flatten(0, 1)).view_as(x)
        if x.sum().item() > 1e9:
            return x
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:Graph break:UserWarning")
@pytest.mark.parametrize("words", [["activation_checkpointing=full"], [SELECTIVE]], ids=["full", "selective"])
def test_a_layer_that_is_not_one_graph_is_checkpointed_around_its_pieces(words: list[str]) -> None:
    model = prepared(Branching, "compile=layer", *words)
    plain = prepared(Branching)
    for n in (1, 2):
        for m in (model, plain):
            m(batch()).square().sum().backward()
        assert all(layer.statistics.num_batches_tracked == n for layer in model)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4, msg=name)
    torch.testing.assert_close(model[0].statistics.running_mean, plain[0].statistics.running_mean)


class Remembering(Layer):
    """A layer whose result depends on what its earlier calls have left: an average in a buffer, written to in place; a
    buffer that is put in the place of another; numbers in attributes. It also has a BatchNorm."""

    average: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(16)
        self.register_buffer("average", torch.zeros(16))
        self.register_buffer("scale", torch.ones(()))
        self.calls, self.last = 0, None

    def forward(self, x: Tensor) -> Tensor:
        x = self.statistics(x.flatten(0, 1)).view_as(x)
        self.calls += 1
        if self.last is None:
            self.last = 1.5
        self.scale = self.scale * 1.1
        self.average.mul_(0.5).add_(x.detach().square().mean((0, 1)), alpha=0.5)
        return super().forward(x - self.average * self.scale) * (self.calls + self.last)


@pytest.mark.parametrize("words", [["activation_checkpointing=full"], [SELECTIVE]], ids=["full", "selective"])
def test_a_layer_is_computed_again_from_the_state_that_it_had(words: list[str]) -> None:
    """Two micro-batches are on their way before the first backward pass, and nothing is counted twice."""
    model, plain = prepared(Remembering, *words), prepared(Remembering)
    for _ in range(2):
        for either in (model, plain):
            losses = [either(batch() * n).square().mean() for n in (1, 2)]
            for loss in losses:
                loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad), name
    for (name, ours), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    assert [(layer.calls, layer.last) for layer in model] == [(4, 1.5)] * LAYERS


class Averaging(Layer):
    """One graph, and its result depends on a buffer that it writes to."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(0.5).add_(x.detach().square().mean((0, 1)), alpha=0.5)
        return super().forward(x - self.average)


def test_a_compiled_layer_that_writes_to_its_buffers_is_checkpointed_around_the_graph() -> None:
    """Within the graph it would be computed again from what it has written."""
    model, plain = prepared(Averaging, "compile=layer", "activation_checkpointing=full"), prepared(Averaging)
    for either in (model, plain):
        for n in (1, 2):
            either(batch() * n).square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert (ours.grad - theirs.grad).norm() <= 1e-2 * theirs.grad.norm(), name  # within the graph: up to 0.5
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


class Random(Layer):
    """Two draws of random numbers in one layer, of which the user wants one kept."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.ops.aten.native_dropout(self.q(x), 0.5, True)[0]
        return x + torch.rand_like(x) * self.wide(x).sum()


def test_a_draw_of_random_numbers_is_never_kept() -> None:
    """The draws behind it would be others when the layer is computed again."""
    results = []
    for words in ([], [SELECTIVE, save("matmul", "aten.native_dropout")]):
        model = prepared(Random, *words)
        torch.manual_seed(2)
        model(batch()).square().sum().backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    for plain, ours in zip(*results, strict=True):
        assert torch.equal(plain, ours)


def test_an_operation_that_torch_does_not_have_is_refused() -> None:
    for word in ("aten.mmm", "aten.mm.out2", "nowhere.mm"):
        with pytest.raises(ConfigError, match=rf"save=\[matmul,{word}\]: PyTorch has no operation {word}; known are"):
            keep_results_of(("matmul", word))


class InPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.relu_(self.wide(x)))


class Doubling(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.wide(x).mul_(2).exp())


def test_a_graph_has_no_operation_in_place() -> None:
    """What is written into a kept result is not written twice."""
    gradients = []
    for words in ([], ["compile=layer", SELECTIVE], ["compile=layer", "activation_checkpointing=full"]):
        model = prepared(Doubling, *words)
        model(0.1 * batch()).square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for plain, *others in zip(*gradients, strict=True):
        for ours in others:
            assert (ours - plain).norm() <= 1e-4 * plain.norm()


class Cached(nn.Module):
    """As a Hugging Face model does, it hands its layers a cache in training, too, unless its config says otherwise."""

    class Layer(Layer):
        def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:  # type: ignore[override]
            if cache is not None:
                x = torch.cat([*cache, x], 1) if cache else x
                cache.append(x)
            return super().forward(x)

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.config, self.layers = SimpleNamespace(use_cache=True), layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, cache=[] if self.config.use_cache else None)
        return x


@pytest.mark.parametrize("words", [["activation_checkpointing=full"], [SELECTIVE]], ids=["full", "selective"])
def test_a_layer_that_is_computed_again_is_given_no_cache(words: list[str]) -> None:
    """It would fill the cache a second time; where nobody can take the cache away, one message says what is wrong."""
    model = Cached(prepared(Cached.Layer, *words))
    with pytest.raises(RuntimeError) as refused:
        model(batch()).sum().backward()
    explained = explain(refused.value, "Net")
    assert explained is not None and str(explained).startswith("Net has a layer that does not compute the same when")
    plain = Cached(prepared(Cached.Layer))
    model = Cached(prepared(Cached.Layer, *words))
    assert without_caches(nn.Sequential(plain, model)) is not None and without_caches(model) is None
    for either in (plain, model):
        either(batch()).square().sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


def test_what_selective_cannot_do_gets_one_message() -> None:
    with pytest.raises(
        ConfigError, match=r"^aten\.relu_\.default writes into a result that activation_checkpointing=sel"
    ):
        prepared(InPlace, SELECTIVE)(batch())
    loss = prepared(Layer, SELECTIVE)(batch()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError) as twice:
        loss.backward()
    explained = explain(twice.value, "Net")
    assert explained is not None and str(explained).startswith("Net takes gradients twice through one forward pass")
    assert str(explained).endswith("; use activation_checkpointing=full")
    assert explain(RuntimeError("something else"), "Net") is None


def test_recompilations_are_told_with_their_cause() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    @torch.compile(backend="eager")
    def forward(x: Tensor, flag: str) -> Tensor:
        return x + len(flag)

    seen, x = Recompilations("layer"), torch.ones(3)
    forward(x, "first")
    seen.after_step(warns=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(5):
            forward(x, f"step {n}")
            seen.after_step(warns=True)
    assert seen.count == 5
    forward(x, "evaluation")
    seen.expect()
    seen.after_step(warns=True)
    assert seen.count == 5
    expected = (
        r"^compile=layer: 6 graphs were compiled after the first step, .* from step to step: "
        r"forward \(test_activation_checkpointing\.py:\d+\): .*flag.*"
    )
    forward(x, "the sixth")
    with pytest.warns(UserWarning, match=expected):
        seen.after_step(warns=True)
    forward(x.double(), "the seventh")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen.after_step(warns=True)
    assert seen.count == 7
