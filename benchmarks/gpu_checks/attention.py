"""What only a GPU can show of `attention=`: each kernel beside fp32, with documents, in one graph, and its speed.

    python benchmarks/gpu_checks/attention.py                  all; FlashAttention 4 compiles every kernel for 5 s
    python benchmarks/gpu_checks/attention.py --only 'exact|speed'
    python benchmarks/gpu_checks/attention.py --accelerator cpu       tries it out anywhere, with small tensors

Writes benchmarks/results/attention-gpu-checks.json. Ends with 1 if a check fails. fa4 needs flash-attn-4 installed.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.device import wait_for  # noqa: E402
from recipes.language_modeling.model import Transformer  # noqa: E402
from shardwise.errors import ConfigError  # noqa: E402
from shardwise.nn.attention import (  # noqa: E402
    _RAN,
    causal_attention,
    document_layout,
    document_starts,
    kernels_that_ran,
    whole_layout,
)
from shardwise.plan.hardware import installed  # noqa: E402
from shardwise.plan.kernel_choice import FLASH_ATTENTION_4  # noqa: E402

# A kernel in bf16 rounds what it keeps: the facts of one H200 are 2.0e-3 to 3.0e-3 of the norm for cuDNN.
BOUND = 1e-2
KERNELS = ["sdpa", "cudnn", "flash", "efficient", "math", "flex", "fa4"]


@dataclass(frozen=True)
class Shape:
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int


class Checks:
    def __init__(self, device: torch.device, path: Path, content: dict[str, Any], only: str) -> None:
        self.device, self.path, self.content, self.only, self.failed = device, path, content, only, 0
        self.on_gpu = device.type == "cuda"
        self.words = [k for k in KERNELS if self.on_gpu or k in ("sdpa", "flash", "math")]
        if "fa4" in self.words and installed("flash-attn-4") != FLASH_ATTENTION_4:
            print(f"flash-attn-4 {FLASH_ATTENTION_4} is not installed: no checks of fa4", flush=True)
            self.words.remove("fa4")

    def check(self, name: str, measure: Callable[[], tuple[bool, dict[str, Any]]]) -> None:
        """Run one check, and record it. An exception is a failure."""
        if not re.search(self.only, name):
            return
        begin = time.perf_counter()
        try:
            holds, numbers = measure()
        except Exception as error:
            holds, numbers = False, {"error": f"{type(error).__name__}: {error}"[:600]}
        seconds = time.perf_counter() - begin
        self.failed += not holds
        self.content["checks"][name] = {"holds": holds, "seconds": round(seconds, 1), **numbers}
        results.write(self.path, self.content)
        shown = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in numbers.items())
        print(f"{'ok    ' if holds else 'FAILED'} {name}: {shown}  ({seconds:.1f} s)", flush=True)


def drawn(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values and the output's gradient, as the model makes them: [B, T, H, D] seen as [B, H, T, D]."""
    generator = torch.Generator(device).manual_seed(0)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    made = [
        torch.randn(shape.batch, shape.length, h, shape.head_dim, generator=generator, device=device) for h in heads
    ]
    return [x.to(dtype).transpose(1, 2) for x in made]


def documents_of(shape: Shape, device: torch.device, mean: int) -> Tensor:
    begins = torch.rand(shape.batch, shape.length, generator=torch.Generator().manual_seed(mean)) < 1 / mean
    return begins.long().cumsum(1).to(device)


def layout_of(q: Tensor, kernel: str, documents: Tensor | None) -> dict[str, Any] | None:
    if documents is None:
        return whole_layout(torch.empty(q.shape[0], q.shape[2], device=q.device), q.dtype, q.shape[3], kernel)
    return document_layout(documents, None, q.dtype, q.shape[3], kernel)


def gradients(parts: list[Tensor], kernel: str, documents: Tensor | None) -> list[Tensor]:
    """The output and the gradients of queries, keys and values."""
    q, k, v = (x.detach().requires_grad_() for x in parts[:3])
    out = causal_attention(q, k, v, layout_of(q, kernel, documents), kernel)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), parts[3])]


def exact(checks: Checks, shape: Shape, kernel: str, mean: int | None) -> tuple[bool, dict[str, Any]]:
    """The distance from fp32 by the norm, over the norm there."""
    documents = None if mean is None else documents_of(shape, checks.device, mean)
    parts = drawn(shape, checks.device, torch.bfloat16)
    ours = gradients(parts, kernel, documents)
    reference = gradients([x.float() for x in parts], "math", documents)
    found = {
        name: float((a.float() - b).norm() / b.norm())
        for name, a, b in zip(("out", "dq", "dk", "dv"), ours, reference, strict=True)
    }
    count = {} if documents is None else {"documents": int(documents[:, -1].sum()) + shape.batch}
    return max(found.values()) < BOUND, found | count


def repeated(checks: Checks, shape: Shape, kernel: str, mean: int | None) -> tuple[bool, dict[str, Any]]:
    """Whether every bit is the same in ten runs with deterministic=true."""
    documents = None if mean is None else documents_of(shape, checks.device, mean)
    parts = drawn(shape, checks.device, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        first = gradients(parts, kernel, documents)
        others = [gradients(parts, kernel, documents) for _ in range(10)]
    finally:
        torch.use_deterministic_algorithms(False)
    differ = sum(not torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    return differ == 0, {"tensors that differ": differ, "of": 4 * len(others)}


def refused(
    checks: Checks, kernel: str, dtype: torch.dtype, head_dim: int, documents: bool
) -> tuple[bool, dict[str, Any]]:
    shape = Shape(1, 256, 4, 2, head_dim)
    try:
        gradients(
            drawn(shape, checks.device, dtype), kernel, documents_of(shape, checks.device, 64) if documents else None
        )
    except ConfigError as error:
        return f"attention={kernel}" in str(error), {"message": str(error)}
    return False, {"message": "it ran"}


def model_on(device: torch.device, kernel: str) -> Transformer:
    torch.manual_seed(0)
    with torch.device(device):
        model = Transformer(1024, 256, 2, 4, 2, 512, 512).to(torch.bfloat16)
    model.choose_attention(kernel)
    return model


def in_a_graph(checks: Checks, kernel: str, mean: int | None, recomputed: bool) -> tuple[bool, dict[str, Any]]:
    """A whole model in one graph, with the numbers of one that is not compiled; also where layers are recomputed."""
    from torch.utils.checkpoint import checkpoint

    shape = Shape(2, 512, 4, 2, 64)
    tokens = torch.randint(0, 1024, (2, 512), generator=torch.Generator().manual_seed(1)).to(checks.device)
    more = {}
    if mean is not None:
        documents = documents_of(shape, checks.device, mean)
        more = {"documents": documents, "starts": document_starts(documents)}

    def run(compiled: bool) -> list[Tensor]:
        model = model_on(checks.device, kernel)
        if recomputed:
            for block in model.blocks:
                forward = block.forward
                block.forward = lambda *a, f=forward, **k: checkpoint(f, *a, use_reentrant=False, **k)  # type: ignore[method-assign,misc]
        call = torch.compile(model) if compiled else model
        hidden = call(tokens, **more)
        (hidden.float() @ torch.linspace(-1, 1, 256, device=checks.device)).square().mean().backward()
        return [hidden.detach(), model.blocks[0].attention.wq.weight.grad]

    torch._dynamo.reset()
    plain = run(False)
    torch._dynamo.utils.counters.clear()
    compiled = run(True)
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    found = {
        name: float((a.float() - b.float()).norm() / b.float().norm())
        for name, a, b in zip(("hidden", "dwq"), compiled, plain, strict=True)
    }
    return breaks == 0 and max(found.values()) < 3e-2, {"graph breaks": breaks, **found}


def speed(checks: Checks, shape: Shape, kernel: str, mean: int | None) -> tuple[bool, dict[str, Any]]:
    """TFLOP/s of forward and backward; the backward counts 2.5 forwards, and half of all pairs of positions."""
    documents = None if mean is None else documents_of(shape, checks.device, mean)
    parts = drawn(shape, checks.device, torch.bfloat16)
    q, k, v = (x.detach().requires_grad_() for x in parts[:3])
    layout = layout_of(q, kernel, documents)

    def step() -> None:
        torch.autograd.grad(causal_attention(q, k, v, layout, kernel), (q, k, v), parts[3])

    rounds = 10 if checks.on_gpu else 1
    for _ in range(3):
        step()
    wait_for(checks.device)
    begin = time.perf_counter()
    for _ in range(rounds):
        step()
    wait_for(checks.device)
    seconds = (time.perf_counter() - begin) / rounds
    pairs = shape.batch * shape.heads * shape.length**2 / 2
    tflops = 3.5 * 4 * pairs * shape.head_dim / seconds / 1e12
    return True, {"ms": seconds * 1e3} | ({"TFLOP/s": tflops} if documents is None else {})


def recorded(checks: Checks, kernel: str) -> tuple[bool, dict[str, Any]]:
    """That the record says which kernel ran, in eager mode and compiled; a Hopper GPU's own choice is cuDNN."""
    found = {}
    for mode in ("eager", "compiled"):
        _RAN.clear()
        torch._dynamo.reset()
        model = model_on(checks.device, kernel)
        call = model if mode == "eager" else torch.compile(model)
        call(torch.zeros(2, 512, dtype=torch.long, device=checks.device)).float().square().mean().backward()
        found[mode] = kernels_that_ran().get("whole sequences")
    hopper = checks.on_gpu and torch.cuda.get_device_capability()[0] == 9
    expected = (["cudnn"] if hopper else found["eager"]) if kernel == "sdpa" else [kernel]
    return all(names == expected for names in found.values()), found


def continued(checks: Checks) -> tuple[bool, dict[str, Any]]:
    """That tokens one by one, from a cache, have the states of the whole sequence."""
    from shardwise.nn.generation import KeyValueCache

    model = model_on(checks.device, "sdpa").float()
    tokens = torch.randint(0, 1024, (2, 24), generator=torch.Generator().manual_seed(2)).to(checks.device)
    with torch.no_grad():
        whole, cache, parts = model(tokens), KeyValueCache(2, 2, 24), []
        for piece in (tokens[:, :9], *tokens[:, 9:].split(1, 1)):
            cache.begin(piece, [piece.shape[1]] * 2)
            parts.append(model(piece, cache))
    distance = float((torch.cat(parts, 1) - whole).norm() / whole.norm())
    return distance < 1e-4, {"distance": distance}


def all_checks(checks: Checks) -> Iterator[tuple[str, Callable[[], tuple[bool, dict[str, Any]]]]]:
    small, gpu = Shape(2, 96, 4, 2, 16), checks.on_gpu
    odd = Shape(1, 960, 8, 2, 128) if gpu else small  # 64 beyond a multiple of 128
    middle = Shape(2, 1024, 8, 2, 128) if gpu else small
    for kernel in checks.words:
        yield f"exact, heads of 64, {kernel}", partial(exact, checks, replace(middle, head_dim=64), kernel, None)
        yield f"exact, heads of 128, {kernel}", partial(exact, checks, middle, kernel, None)
        yield f"exact, 960 tokens, {kernel}", partial(exact, checks, odd, kernel, None)
        yield f"recorded, {kernel}", partial(recorded, checks, kernel)
        yield f"graph, {kernel}", partial(in_a_graph, checks, kernel, None, False)
        if kernel != "cudnn":  # few documents, and more than 256, for which FlashAttention 4 has other code
            yield f"exact, documents of 200, {kernel}", partial(exact, checks, middle, kernel, 200)
            yield f"exact, documents of 4, {kernel}", partial(exact, checks, middle, kernel, 4)
            yield f"deterministic, {kernel}", partial(repeated, checks, middle, kernel, None)
        if kernel in ("fa4", "flex"):
            yield f"graph, recomputed, {kernel}", partial(in_a_graph, checks, kernel, None, True)
            yield f"graph, documents, {kernel}", partial(in_a_graph, checks, kernel, 100, False)
        if kernel in ("fa4", "flash"):
            yield f"deterministic, documents, {kernel}", partial(repeated, checks, middle, kernel, 200)
        if kernel == "fa4":
            yield "exact, heads of 256, fa4", partial(exact, checks, replace(middle, head_dim=256), kernel, None)
    for kernel, dtype, size, documents in (
        ("cudnn", torch.bfloat16, 64, True), ("cudnn", torch.float32, 64, False), ("flash", torch.float32, 64, False),
        ("flash", torch.bfloat16, 60, True), ("efficient", torch.float64, 64, False), ("fa4", torch.float32, 64, False),
    ):  # fmt: skip
        if gpu and kernel in checks.words:
            name = f"refused, {kernel}, {dtype}, heads of {size}{', documents' * documents}"
            yield name, partial(refused, checks, kernel, dtype, size, documents)
    yield "continued from a cache", partial(continued, checks)
    for kernel in checks.words:
        large = Shape(2, 8192, 32, 8, 128) if gpu else small
        if kernel not in ("sdpa", "math"):
            yield f"speed, heads of 128, {kernel}", partial(speed, checks, large, kernel, None)
            yield f"speed, heads of 64, {kernel}", partial(speed, checks, replace(large, head_dim=64), kernel, None)
        if kernel in ("flash", "flex", "fa4"):
            yield f"speed, documents of 1024, {kernel}", partial(speed, checks, large, kernel, 1024)


def main() -> int:
    parser = results.command_line(__doc__)
    parser.add_argument("--only", default="", help="a regular expression: the checks to run")
    arguments = parser.parse_args()
    environment, _ = results.measured_on(arguments.accelerator, arguments.commit)
    content = {"command": results.command(), "environment": environment, "bound": BOUND, "checks": {}}
    path = arguments.out / "attention-gpu-checks.json"
    checks = Checks(torch.device(arguments.accelerator), path, content, arguments.only)
    for name, measure in all_checks(checks):
        checks.check(name, measure)
    print(f"{checks.failed} of {len(content['checks'])} checks failed; written: {path}", flush=True)
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
