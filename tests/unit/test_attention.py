"""Which kernel computes attention: what is refused, what `auto` becomes, and that the record says what ran."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from recipes.language_modeling.model import Transformer
from recipes.language_modeling.module import LanguageModel
from shardwise.config.groups import DdpConfig, PrecisionConfig
from shardwise.config.schema import AttentionKernel, RunConfig
from shardwise.errors import ConfigError
from shardwise.nn import attention
from shardwise.nn.attention import causal_attention, document_layout, kernels_that_ran, whole_layout
from shardwise.nn.generation import KeyValueCache
from shardwise.parallel.context_parallel import ContextParallel
from shardwise.plan import Host, Plan
from shardwise.plan.kernel_choice import (
    FLASH_ATTENTION_4,
    Facts,
    check_takes_attention,
    choose_kernel,
    explain_attention,
    gather_facts,
    obstacle,
)
from shardwise.plan.plan import Choice
from shardwise.plan.resolve import make_plan
from tests.harness import flash_attention_4 as stand_in
from tests.harness.varlen import as_on_a_gpu

HOPPER = Facts("cuda", (9, 0), "bfloat16", deterministic=False, documents=False, head_size=128,
               flash_attention_4=FLASH_ATTENTION_4, cudnn=(9, 19, 0))  # fmt: skip
CPU = dataclasses.replace(HOPPER, accelerator="cpu", capability=None, dtype="float32", cudnn=None)
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2], [4, 4, 5, 5, 5, 5, 6, 6]])


@pytest.fixture(autouse=True)
def nothing_ran() -> Iterator[None]:
    attention._RAN.clear()
    yield
    attention._RAN.clear()


BF16 = PrecisionConfig("bf16", compute_dtype="bfloat16")


def config(**changes: Any) -> RunConfig:
    given: dict[str, Any] = {
        "micro_batch_size": 1, "global_batch_size": 1, "max_steps": 1, "strategy": DdpConfig(),
        "module": {"_target_": "recipes.language_modeling.module.LanguageModel", "model": {"dim": 64, "n_heads": 4}},
        "data": {"_target_": "a.Data"},
    }  # fmt: skip
    return RunConfig(**(given | changes))


# --- what is decided before a rank starts


@pytest.mark.parametrize(
    ("kernel", "changes", "rule"),
    [
        ("fa4", {"accelerator": "cpu"}, "runs on Hopper and Blackwell GPUs, and this run is on the CPU"),
        ("fa4", {"capability": (8, 0)}, "compute capability 9.x and 10.x, and these have 8.0; use attention=cudnn"),
        ("fa4", {"capability": (12, 0)}, "these have 12.0"),
        ("fa4", {"dtype": "float32"}, "in 16 bits, and the precision computes in float32; use attention=efficient"),
        ("fa4", {"head_size": 100}, "multiple of 8, up to 256, and the model's have 100"),
        ("fa4", {"head_size": 192, "capability": (10, 0)}, "up to 128, and the model's have 192"),
        ("fa4", {"flash_attention_4": None}, f'flash-attn-4 {FLASH_ATTENTION_4}, which is not installed: pip install'),
        ("fa4", {"flash_attention_4": "4.0.0b29"}, "where 4.0.0b29 is installed"),
        ("cudnn", {"accelerator": "cpu"}, "cuDNN runs on GPUs"),
        ("cudnn", {"capability": (7, 5)}, "needs compute capability 8.0, and these GPUs have 7.5"),
        ("cudnn", {"dtype": "float64"}, "the precision computes in float64; use attention=auto"),
        ("cudnn", {"deterministic": True}, "with deterministic=true torch does not run it"),
        ("cudnn", {"documents": True}, "keeps documents apart, as data.document_mask=true asks for"),
        ("cudnn", {"head_size": 256}, "up to 128, and the model's have 256"),
        ("cudnn", {"cudnn": (9, 10, 2)}, "cuDNN 9.10.2 is wrong for some lengths, and 9.15.1 is the first that is not"),
        ("flash", {"capability": (7, 0)}, "needs compute capability 8.0"),
        ("flash", {"dtype": "float32"}, "in 16 bits"),
        ("flash", {"head_size": 264}, "at most 256 and the model's have 264"),
        ("flash", {"head_size": 60, "documents": True}, "multiple of 8, up to 256, and the model's have 60"),
        ("efficient", {"accelerator": "cpu"}, "this run is on the CPU; use attention=flash or attention=auto"),
        ("efficient", {"dtype": "float64"}, "does not compute in float64"),
        ("efficient", {"capability": (7, 5)}, "needs compute capability 8.0 for bfloat16"),
        ("efficient", {"head_size": 66, "dtype": "float32"}, "multiple of 4, and the model's have 66"),
        ("flex", {"accelerator": "cpu"}, "no backward pass on the CPU"),
        ("flex", {"dtype": "float64"}, "does not compute in float64"),
        ("flex", {"head_size": 8}, "at least 16, and the model's have 8"),
        ("flex", {"capability": (7, 0)}, "from compute capability 8.0 on"),
        ("cudnn", {"context_by_keys": True}, "queries than keys, which this kernel does not align; use attention=fl"),
        ("flash", {"context_by_keys": True, "documents": True}, "keeps documents apart by a mask, and this kernel"),
        ("flash", {"context_by_keys": True, "head_size": 60}, "multiple of 8, up to 256, and the model's have 60"),
        ("fa4", {"context_by_keys": True, "documents": True}, "by a mask, and this kernel takes none; use attention="),
    ],
)  # fmt: skip
def test_a_kernel_that_cannot_run_is_refused_by_name(kernel: str, changes: dict[str, Any], rule: str) -> None:
    assert choose_kernel(kernel, HOPPER) == Choice(kernel, "")
    with pytest.raises(ConfigError) as error:
        choose_kernel(kernel, dataclasses.replace(HOPPER, **changes))
    message = str(error.value)
    assert message.startswith(f"attention={kernel}: ") and rule in message and "\n" not in message
    assert "attention=auto" in message


def test_what_is_not_known_speaks_against_no_kernel_that_the_user_has_named() -> None:
    unknown = dataclasses.replace(HOPPER, capability=None, head_size=None, cudnn=None)
    for kernel in get_args(AttentionKernel):
        if kernel != "auto":
            assert obstacle(kernel, unknown) is None
    assert obstacle("math", dataclasses.replace(CPU, dtype="float64", head_size=7)) is None


@pytest.mark.parametrize(
    ("changes", "kernel", "why"),
    [
        ({}, "fa4", None),
        ({"capability": (10, 0), "head_size": 64}, "fa4", None),
        ({"dtype": "float16", "documents": True, "deterministic": True}, "fa4", None),
        ({"head_size": None}, "fa4", None),
        ({"context_by_keys": True}, "fa4", None),
        ({"context_by_keys": True, "documents": True}, "sdpa", "by a mask"),
        ({"flash_attention_4": None}, "sdpa", "which is not installed"),
        ({"capability": None}, "sdpa", "compute capability is not known"),
        ({"capability": (8, 0)}, "sdpa", "these have 8.0"),
        ({"capability": (10, 0), "head_size": 256}, "sdpa", "up to 128"),
        ({"dtype": "float32"}, "sdpa", "in 16 bits"),
        ({"accelerator": "cpu"}, "sdpa", "on the CPU"),
    ],
)
def test_auto_is_flash_attention_4_where_it_can_run_and_says_why_not(
    changes: dict[str, Any], kernel: str, why: str | None
) -> None:
    made = choose_kernel("auto", dataclasses.replace(HOPPER, **changes))
    assert made.name == kernel and (why or "can run") in made.reason


def test_the_plan_holds_the_choice_and_one_of_before_still_loads() -> None:
    cpu, hopper = Host(cuda_devices=0, run_id="r"), Host(cuda_devices=1, run_id="r", gpu_capability=(9, 0))
    made = make_plan(config(attention="math"), cpu)
    assert made.chosen_attention == Choice("math", "")
    assert Plan.from_json(made.to_json()) == made
    auto = make_plan(config(), cpu)
    assert (
        auto.chosen_attention.name == "sdpa"
        and "on the CPU" in auto.chosen_attention.reason
        and not explain_attention(auto)
    )
    assert Plan.from_json(auto.to_json()) == auto
    before = json.loads(auto.to_json())
    del before["attention"]
    assert Plan.from_json(json.dumps(before)).chosen_attention.name == "sdpa"
    assert explain_attention(make_plan(config(), hopper)) == [
        "attention=sdpa: torch chooses by the tensors; fa4 cannot run: FlashAttention 4 computes in 16 bits, and the "
        "precision computes in float32"
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "flash"}, "attention=flash: .* computes in float32; use attention=efficient"),
        ({"attention": "cudnn", "accelerator": "cpu"}, "attention=cudnn: cuDNN runs on GPUs"),
        ({"attention": "efficient", "module": {"_target_": "a.B", "dim": 66, "n_heads": 1}},
         "multiple of 4, and the model's have 66"),
        ({"attention": "efficient", "module": {"_target_": "a.B", "model": {"dim": 66, "n_heads": 1}}},
         "multiple of 4, and the model's have 66"),
        ({"attention": "cudnn", "precision": BF16, "data": {"_target_": "a.D", "document_mask": True}},
         "attention=cudnn: .*document_mask=true"),
        ({"attention": "cudnn", "precision": BF16, "deterministic": True}, "cudnn: with deterministic"),
    ],
)  # fmt: skip
def test_what_the_config_says_is_known(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(config(**changes), Host(cuda_devices=1, run_id="r", gpu_capability=(9, 0)))


def test_flash_attention_4_is_there_only_with_what_it_is_written_in(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper, at = Host(cuda_devices=1, run_id="r", gpu_capability=(9, 0)), "shardwise.plan.kernel_choice"
    monkeypatch.setattr(f"{at}.installed", lambda package: "4.0.0")
    for found, version in ((object(), "4.0.0"), (None, None)):
        monkeypatch.setattr(f"{at}.find_spec", lambda module, found=found: found)
        assert gather_facts(config(), hopper, "cuda").flash_attention_4 == version


def test_a_module_without_choose_attention_computes_its_own() -> None:
    hopper = Host(cuda_devices=1, run_id="r", gpu_capability=(9, 0))
    auto, named = make_plan(config(), hopper), make_plan(config(attention="efficient"), hopper)
    assert check_takes_attention(named, LanguageModel) == named
    own = check_takes_attention(auto, object())
    assert own.chosen_attention.name == "own" and not explain_attention(own)
    with pytest.raises(ConfigError, match=r"attention=efficient: .*LanguageModel has no choose_attention.*leave it"):
        check_takes_attention(named, object())


# --- what runs


def parts(heads: int = 4, shared: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(2, 8, h, 16, generator=generator, dtype=dtype) for h in (heads, shared, shared, heads)]
    return [x.transpose(1, 2) for x in made]


def run(kernel: str, documents: Tensor | None = None, call: Any = causal_attention) -> list[Tensor]:
    """The output and the gradients."""
    *leaves, gradient = parts()
    q, k, v = (x.detach().requires_grad_() for x in leaves)
    layout = None if documents is None else document_layout(documents, None, q.dtype, 16, kernel)
    out = call(q, k, v, layout, kernel)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), gradient)]


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


FUSED = "aten._scaled_dot_product_flash_attention_for_cpu.default"


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_the_kernel_that_is_asked_for_runs_and_the_record_says_so(documents: Tensor | None) -> None:
    where = "whole sequences" if documents is None else "documents"
    found = {}
    for kernel, is_fused, name in (("sdpa", True, "flash"), ("flash", True, "flash"), ("math", False, "math")):
        attention._RAN.clear()
        with Operators() as seen:
            found[kernel] = run(kernel, documents)
        assert (FUSED in seen.names) == is_fused
        assert kernels_that_ran() == {where: [name]}
    for ours, theirs in zip(found["math"], found["sdpa"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for ours, theirs in zip(found["flash"], found["sdpa"], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kernel", ["sdpa", "flash", "fa4"])
def test_queries_of_the_last_positions_need_no_mask(kernel: str) -> None:
    """With stand-ins for the kernels: the output and the gradients of rows of a whole attention."""
    *leaves, gradient = parts()
    found, last = [], slice(3, None)
    for word, of in (("math", slice(None)), (kernel, last)):
        q, k, v = (x.detach().requires_grad_() for x in leaves)
        with as_on_a_gpu():
            out = causal_attention(q[:, :, of], k, v, None, word)
        rows = out if word == kernel else out[:, :, last]
        found.append([rows.detach(), *torch.autograd.grad(rows, (q, k, v), gradient[:, :, last])])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 if kernel == "fa4" else 1e-12)
    assert kernels_that_ran() == {"whole sequences": ["math", "fa4" if kernel == "fa4" else "flash"]}


def test_by_keys_a_mask_is_made_for_a_kernel_that_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents need one with every kernel, and a kernel that takes none is refused."""
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 1, group_name="none")
    own = ContextParallel(group, by_keys=True, tensors=("tokens",))
    own.length = 4
    monkeypatch.setattr(attention, "sequence_parts", lambda: own)
    tokens = torch.zeros(2, 4)
    for kernel, needs in (("fa4", False), ("sdpa", True), ("math", True)):
        layout = whole_layout(tokens, torch.bfloat16, 16, kernel)
        assert layout is not None and ("masks" in layout) == needs
    masks = document_layout(DOCUMENTS, None, torch.bfloat16, 16)["masks"]
    assert [mask.shape for mask in masks] == [(2, 1, 2, 4), (2, 1, 2, 6)], "two runs, with the keys up to their ends"
    for kernel in ("cudnn", "flex", "fa4"):
        with pytest.raises(ConfigError, match=f"attention={kernel}: .* needs a mask with strategy.context_parallel_m"):
            document_layout(DOCUMENTS, None, torch.bfloat16, 16, kernel)


def test_torchs_own_operator_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments and shapes, forward and backward, on tensors without memory: its kernel needs a GPU."""
    monkeypatch.setattr(attention, "runs_varlen", lambda *_: True)
    with Operators() as seen:
        q, k, v = (
            torch.empty(2, n, h, 64, device="meta", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
            for h, n in ((4, 8), (2, 24), (2, 24))
        )
        out = causal_attention(q, k, v, None, "sdpa")
        gradients = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert out.shape == q.shape and [x.shape for x in gradients] == [x.shape for x in (q, k, v)]
    assert {"torch_attn._varlen_attn.default", "torch_attn._varlen_attn_backward.default"} <= seen.names


def test_what_is_compiled_is_recorded_and_stays_one_graph() -> None:
    for kernel, name in (("sdpa", "flash"), ("math", "math"), ("fa4", "fa4")):
        attention._RAN.clear()
        torch._dynamo.reset()
        plain = run(kernel)
        attention._RAN.clear()
        graphs: list[set[str]] = []

        def look(graph: torch.fx.GraphModule, _: Any, into: list[set[str]] = graphs) -> Any:
            into.append({str(node.target) for node in graph.graph.nodes})
            return make_boxed_func(graph.forward)

        compiled = torch.compile(causal_attention, backend=aot_autograd(fw_compiler=look), fullgraph=True)
        for ours, theirs in zip(run(kernel, call=compiled), plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        assert len(graphs) == 2 and (FUSED in graphs[0]) == (name == "flash")  # forward and backward
        assert ("shardwise.flash_attention_4.default" in graphs[0]) == (name == "fa4")
        assert kernels_that_ran() == {"whole sequences": [name]}


@pytest.mark.parametrize("compiled", [False, True])
def test_a_kernel_that_torch_does_not_take_is_refused_at_the_first_call(compiled: bool) -> None:
    torch._dynamo.reset()
    call = torch.compile(causal_attention, backend="aot_eager") if compiled else causal_attention
    with pytest.raises(
        ConfigError, match=r"attention=efficient: torch .* no such kernel for torch.float64 heads of 16 on cpu; use"
    ):
        run("efficient", call=call)
    assert kernels_that_ran() == {}


def test_cudnn_keeps_no_documents_apart() -> None:
    with pytest.raises(ConfigError, match=r"attention=cudnn: the batch has documents to keep apart"):
        document_layout(DOCUMENTS, None, torch.bfloat16, 16, "cudnn")


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_flex_attention_equals_math(documents: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients, which it does not have on the CPU, and not compiled, which takes a minute there."""
    monkeypatch.setattr("shardwise.nn.attention_kernels._compiled", lambda function: function)
    q, k, v, _ = parts(dtype=torch.float32)
    if documents is None:
        layouts = {kernel: whole_layout(torch.zeros(2, 8), q.dtype, 16, kernel) for kernel in ("flex", "math")}
    else:
        layouts = {kernel: document_layout(documents, None, q.dtype, 16, kernel) for kernel in ("flex", "math")}
    flex, plain = (causal_attention(q, k, v, layouts[kernel], kernel) for kernel in ("flex", "math"))
    torch.testing.assert_close(flex, plain, rtol=0, atol=1e-6)
    assert [*kernels_that_ran().values()] == [["flex", "math"]]


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_the_operator_of_flash_attention_4_equals_math(documents: Tensor | None) -> None:
    """With the stand-in for its kernel: the layouts, what is saved for the backward pass, and the shared heads."""
    for ours, theirs in zip(run("fa4", documents), run("math", documents), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)  # the log of the sums is in fp32


def test_the_operator_of_flash_attention_4_is_a_whole_one() -> None:
    q, k, v, _ = (x.transpose(1, 2).contiguous() for x in parts())
    starts = torch.tensor([0, 3, 8, 16], dtype=torch.int32)
    for given in ((q, k, v, None, 8), (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), starts, 8)):
        for needs_gradient in (False, True):
            made = [x.detach().requires_grad_(needs_gradient) for x in given[:3]]  # type: ignore[union-attr]
            torch.library.opcheck(torch.ops.shardwise.flash_attention_4.default, (*made, *given[3:]))


def test_selective_checkpointing_can_keep_its_output() -> None:
    def keep(ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kept = op is torch.ops.shardwise.flash_attention_4.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v, gradient = parts()
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    stand_in.calls |= {"forward": 0}
    for context, calls in ((lambda: create_selective_checkpoint_contexts(keep), 1), (None, 2)):
        more = {} if context is None else {"context_fn": context}
        stand_in.calls["forward"] = 0
        out = checkpoint(causal_attention, *leaves, None, "fa4", use_reentrant=False, **more)
        torch.autograd.grad(out, leaves, gradient)
        assert stand_in.calls["forward"] == calls


def test_the_model_has_one_kernel_in_every_layer_and_continues_texts_with_torchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = Transformer(61, 64, 2, 4, 2, 96, 32).double()
    tokens = torch.randint(0, 61, (2, 8))
    hidden = {}
    for kernel in ("math", "fa4"):
        model.choose_attention(kernel)
        for documents in (None, DOCUMENTS):
            hidden[kernel, documents is None] = model(tokens, documents=documents)
    assert kernels_that_ran() == {"whole sequences": ["math", "fa4"], "documents": ["math", "fa4"]}
    for is_whole in (True, False):
        torch.testing.assert_close(hidden["math", is_whole], hidden["fa4", is_whole], rtol=0, atol=1e-6)
    monkeypatch.setattr(attention, "flash_attention_4", None)  # not called from here on
    cache, steps = KeyValueCache(2, 2, 8), []
    for piece in tokens.split((3, 4, 1), 1):
        cache.begin(piece, [piece.shape[1]] * 2)
        steps.append(model(piece, cache))
    torch.testing.assert_close(torch.cat(steps, 1), hidden["math", True], rtol=0, atol=1e-12)
