"""The loss without all logits in memory: the same numbers as with them, for less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.language_modeling.model import Transformer
from recipes.language_modeling.module import LanguageModel
from shardwise.errors import ConfigError
from shardwise.nn import linear_cross_entropy as file
from shardwise.nn.linear_cross_entropy import CHUNK_LOGITS, fused_rows, linear_cross_entropy, rows_of_a_chunk
from shardwise.plan.kernel_choice import LARGE_LOGITS
from tests.harness.quack_kernels import replace_kernels

Result = tuple[Tensor, Tensor, Tensor]


def drawn(rows: int, width: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head's weight, and targets of which the first nine and some others do not count."""
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64) / 4
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[:9] = targets[12::7] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def computed(hidden: Tensor, weight: Tensor, targets: Tensor, scale: float = 1.0, **how: Any) -> Result:
    """The loss and the gradients of `scale` times it."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets, **how)
    (loss * scale).backward()
    assert hidden.grad is not None and weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


def check_close(ours: Result, theirs: Result, bound: float) -> None:
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.dtype == expected.dtype and mine.shape == expected.shape
        torch.testing.assert_close(mine, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("chunk_rows", [1, 8, 36, 37, 64, 0])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_chunks_change_neither_the_value_nor_a_gradient(dtype: torch.dtype, bound: float, chunk_rows: int) -> None:
    """37 rows, so that most chunks do not divide them; an odd vocabulary; one chunk of 8 counts nowhere."""
    inputs = drawn(37, 12, 51, dtype)
    for reduction in ("sum", "mean"):
        full = computed(*inputs, scale=0.3, loss="full", reduction=reduction)
        check_close(
            computed(*inputs, scale=0.3, loss="chunked", reduction=reduction, chunk_rows=chunk_rows), full, bound
        )


def test_rows_may_have_several_dims_and_no_target_may_count() -> None:
    hidden, weight, targets = drawn(36, 12, 51, torch.float64)
    shaped = hidden.unflatten(0, (4, 9)), weight, targets.unflatten(0, (4, 9))
    loss, of_hidden, of_weight = computed(*shaped, chunk_rows=8)
    check_close((loss, of_hidden.flatten(0, 1), of_weight), computed(hidden, weight, targets, loss="full"), 1e-12)
    loss, of_hidden, of_weight = computed(hidden, weight, torch.full_like(targets, -100), chunk_rows=8)
    assert not loss and not of_hidden.any() and not of_weight.any()
    loss, of_hidden, of_weight = computed(hidden[:0], weight, targets[:0])
    assert not loss and of_hidden.shape == (0, 12) and not of_weight.any()


@pytest.mark.parametrize("target", [-1, -101, 7, 2**40])
def test_a_target_that_is_not_of_the_vocabulary_is_refused(target: int) -> None:
    hidden, weight = torch.randn(4, 3), torch.randn(7, 3)
    targets = torch.tensor([0, 6, target, -100])
    with pytest.raises(ConfigError, match=f"a target is {target}: targets are from 0 to 6, and -100 where none"):
        linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(IndexError):  # torch's own
        linear_cross_entropy(hidden, weight, targets, loss="full")


def test_in_16_bits_chunks_lose_no_more_than_the_whole() -> None:
    """The weight's gradient adds up in fp32 over 64 chunks: in bf16 its small parts would be lost."""
    inputs = drawn(512, 16, 64, torch.bfloat16)
    exact = computed(*(x.double() if x.is_floating_point() else x for x in inputs), scale=1 / 3, loss="full")
    full, ours = (computed(*inputs, scale=1 / 3, **how) for how in ({"loss": "full"}, {"chunk_rows": 8}))
    assert full[0].dtype == ours[0].dtype == torch.float32
    for name, right, theirs, mine, factor in zip(
        ("loss", "hidden", "weight"), exact, full, ours, (1.1, 1.5, 1.1), strict=True
    ):
        errors = [float((x.double() - right).norm() / right.norm()) for x in (theirs, mine)]
        assert errors[1] <= max(factor * errors[0], 1e-6), (name, errors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_reaches_it_as_a_linear_layer(dtype: torch.dtype) -> None:
    inputs = drawn(40, 16, 64, torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        full, ours = computed(*inputs, loss="full"), computed(*inputs, chunk_rows=8)
        wide = drawn(40, 16, 64, torch.float64)  # which autocast leaves as it is
        check_close(computed(*wide, chunk_rows=8), computed(*wide, loss="full"), 1e-12)
    check_close(ours, full, 2e-2)
    assert not torch.equal(ours[1], computed(*inputs, chunk_rows=8)[1])


class Largest(TorchDispatchMode):
    """Notes the tensor with the most elements that is made, and counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.products = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "shardwise":
            with self:  # what the operator does is looked at as well
                return file._summed._init_fn(*args)
        out = function(*args, **kwargs or {})
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        self.products += function.__name__.split(".")[0] in ("mm", "addmm", "addmm_")
        return out


def test_no_tensor_is_larger_than_a_chunk_of_logits() -> None:
    rows, width, vocabulary = 640, 4, 96
    inputs = drawn(rows, width, vocabulary, torch.bfloat16)
    with Largest() as full:
        computed(*inputs, loss="full")
    with Largest() as chunked:
        computed(*inputs, chunk_rows=64)
    assert full.elements == rows * vocabulary
    assert chunked.elements == 64 * vocabulary > rows * width
    assert full.products == 3 and chunked.products == 3 * 10


def test_only_what_is_needed_is_computed() -> None:
    hidden, weight, targets = drawn(64, 4, 96, torch.float32)
    for x, y, products in (
        (hidden, weight.detach(), 2),
        (hidden.detach(), weight, 2),
        (hidden.detach(), weight.detach(), 1),
    ):
        with Largest() as seen:
            loss = linear_cross_entropy(x, y, targets)
        assert seen.products == products and loss.requires_grad is (products == 2)
        if products == 2:
            loss.backward()
    check_close((loss, hidden.grad, weight.grad), computed(hidden, weight, targets, loss="full"), 1e-5)  # type: ignore[arg-type]
    with torch.no_grad(), Largest() as seen:
        assert linear_cross_entropy(hidden, weight, targets) == pytest.approx(loss)
    assert seen.products == 1


@pytest.mark.parametrize("vocabulary", [8, 61, 256, 50304, 128256, 2**29])
@pytest.mark.parametrize("rows", [1, 128, 129, 4096, 8192, 32768, 1_000_003])
def test_chunks_are_of_one_size_and_not_too_large(rows: int, vocabulary: int) -> None:
    step = rows_of_a_chunk(rows, vocabulary, CHUNK_LOGITS)
    assert step % 128 == 0 and (step * vocabulary <= CHUNK_LOGITS or step == 128)
    chunks = -(-rows // step)
    assert chunks * step - rows < 128 * chunks  # the last is as large as the others, but for rounding


def test_what_fits_into_a_chunk_is_what_auto_holds_at_once() -> None:
    assert CHUNK_LOGITS == LARGE_LOGITS


def test_gradients_of_gradients_need_all_logits() -> None:
    hidden, weight, targets = drawn(16, 4, 24, torch.float64)
    first = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, loss="full"), hidden, create_graph=True)
    first[0].square().sum().backward()
    with pytest.raises(ConfigError, match=r"loss=chunked is differentiated.*use loss=full"):
        torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), hidden, create_graph=True)


def test_fused_says_where_it_runs() -> None:
    hidden, weight, targets = drawn(16, 4, 24, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"runs on a GPU.*here are cpu, bfloat16 and 24: use loss=chunked"):
        linear_cross_entropy(hidden, weight, targets, loss="fused")
    with pytest.raises(ConfigError, match="loss=fast: must be one of full, chunked, fused"):
        linear_cross_entropy(hidden, weight, targets, loss="fast")


def test_fused_gives_its_kernel_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel itself runs on GPUs: benchmarks/gpu_checks/loss.py."""
    replace_kernels(monkeypatch)
    for with_gradients in (False, True):
        logits = drawn(30, 4, 24, torch.bfloat16)[1].detach().repeat(2, 8)
        targets = drawn(48, 4, 32, torch.bfloat16)[2]
        found = []
        for rows in (fused_rows, file._plain_rows):
            own, losses = logits.clone(), torch.empty(48)
            rows(own, targets, losses, with_gradients)
            found.append((losses, own))
        torch.testing.assert_close(found[0][0], found[1][0])
        assert torch.equal(found[0][1], logits) is not with_gradients
        if with_gradients:
            torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-2, atol=1e-6)


# What torch says to itself while it compiles
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_it_is_one_node_of_one_graph() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    hidden, weight, targets = drawn(40, 16, 64, torch.float64)

    def step(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            loss = linear_cross_entropy(hidden * 2, weight, targets, chunk_rows=8)
        return loss / (targets != -100).sum()

    def gradients(function: Any) -> Result:
        leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = function(*leaves, targets)
        (loss * 0.7).backward()
        return loss.detach(), leaves[0].grad, leaves[1].grad  # type: ignore[return-value]

    ours = gradients(torch.compile(step, fullgraph=True, backend="aot_eager"))
    check_close(ours, gradients(step), 1e-12)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_language_model_never_holds_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in training nor in validation."""
    monkeypatch.setattr(file, "CHUNK_LOGITS", 1)
    torch.manual_seed(0)
    model = Transformer(vocab_size=311, dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=24, max_seq_len=64)
    module = LanguageModel(model)
    batch = {key: torch.randint(311, (4, 64)) for key in ("tokens", "targets")}
    batch["targets"][1, 5:] = -100
    losses = {}
    for name in ("full", "chunked"):
        module.choose_loss(name)
        with Largest() as seen:
            loss = module.training_step(batch, 0)
            loss.backward()
        with torch.no_grad(), Largest() as evaluated:
            total, tokens = module._loss(batch)
        assert (max(seen.elements, evaluated.elements) >= 4 * 64 * 311) is (name == "full")
        gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        losses[name] = [loss.detach(), total / tokens, *gradients]
        module.zero_grad()
    assert len(losses["full"]) == len(list(module.parameters())) + 2
    for mine, expected in zip(losses["chunked"], losses["full"], strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


class Tied(nn.Module):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(51, 12, dtype=torch.float64)

    def forward(self, tokens: Tensor, targets: Tensor, **how: Any) -> Tensor:
        return linear_cross_entropy(self.embedding(tokens), self.embedding.weight, targets, **how)


def test_a_tied_weight_gets_both_gradients_and_windows_add_up() -> None:
    model, gradients = Tied(), []
    for how in ({"loss": "full"}, {"chunk_rows": 8}):
        model.zero_grad()
        for seed in (0, 1):  # two micro-batches of a window
            tokens = torch.randint(51, (20,), generator=torch.Generator().manual_seed(seed))
            (model(tokens, tokens.roll(-1), **how) * (seed + 0.5)).backward()
        gradients.append(model.embedding.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
