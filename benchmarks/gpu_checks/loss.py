"""What only a GPU shows of `loss=full | chunked | fused`: gradients, bits, graphs, memory and speed.

    python benchmarks/gpu_checks/loss.py        on one GPU: about a minute

Prints a line for each check, and exits with 1 if one fails. Without quack-kernels the checks of `fused` are left out,
and a line says so. Writes benchmarks/results/loss-gpu-checks.json.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic algorithms

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.device import free_memory  # noqa: E402
from shardwise.nn.linear_cross_entropy import VocabularyPart, _plain_rows, fused_rows_of_a_part, linear_cross_entropy  # noqa: E402
from shardwise.nn.peers import Peers  # noqa: E402
from shardwise.plan.kernel_choice import has_quack  # noqa: E402

GPU = torch.device("cuda", 0)
WAYS = ["full", "chunked", *(["fused"] if has_quack() else [])]
SHAPES = {"1.5 B": (32768, 2048, 128256), "8 B": (8192, 4096, 128256)}  # rows, width, vocabulary
Result = tuple[Tensor, Tensor, Tensor]
Numbers = dict[str, Any]


def drawn(rows: int, width: int, vocabulary: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states as a norm gives them, a head whose logits differ by a few nats, and targets of which some do not
    count: a whole chunk of 2,048 rows where there are so many."""
    generator = torch.Generator(GPU).manual_seed(rows)
    hidden = torch.randn(rows, width, generator=generator, device=GPU).to(dtype)
    weight = (torch.randn(vocabulary, width, generator=generator, device=GPU) * 2 / width**0.5).to(dtype)
    targets = torch.randint(vocabulary, (rows,), generator=generator, device=GPU)
    targets[: rows // 8] = targets[::5] = -100
    return hidden, weight, targets


def computed(
    hidden: Tensor, weight: Tensor, targets: Tensor, step: Callable[..., Tensor] | None = None, **how: Any
) -> Result:
    leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = (step or linear_cross_entropy)(*leaves, targets, **how)
    (loss / 3000).backward()
    assert leaves[0].grad is not None and leaves[1].grad is not None
    return loss.detach(), leaves[0].grad, leaves[1].grad


def exact(hidden: Tensor, weight: Tensor, targets: Tensor) -> Result:
    """In fp32, without TensorFloat-32."""
    torch.set_float32_matmul_precision("highest")
    return computed(hidden.float(), weight.float(), targets, loss="full")


def errors(ours: Result, right: Result) -> dict[str, float]:
    """The norm of the difference over the norm of what is right."""
    named = zip(("loss", "hidden", "weight"), ours, right, strict=True)
    return {name: float((a.float() - b.float()).norm() / b.float().norm()) for name, a, b in named}


def check_gradients() -> Iterator[tuple[str, bool, Numbers]]:
    """Each way errs no more than the logits of all rows at once, against fp32: over chunk borders, ignored targets, and
    numbers of rows that no power of two divides."""
    for rows, width, vocabulary, dtype in (
        (6001, 512, 128256, torch.bfloat16), (1000, 256, 151936, torch.bfloat16), (7, 256, 50304, torch.bfloat16),
        (6001, 512, 128256, torch.float16),
    ):  # fmt: skip
        inputs = drawn(rows, width, vocabulary, dtype)
        right = exact(*inputs)
        found = {way: errors(computed(*inputs, loss=way), right) for way in WAYS}
        of_full = found["full"]
        bounds = {
            "loss": max(1e-5, 2 * of_full["loss"]),
            "hidden": 2 * of_full["hidden"],
            "weight": 1.5 * of_full["weight"],
        }
        for way in WAYS[1:]:
            good = all(found[way][name] <= bound for name, bound in bounds.items())
            name = f"{way}: gradients against fp32, {rows} × {vocabulary}, {str(dtype).removeprefix('torch.')}"
            yield name, good, {"errors": found[way], "errors_of_full": of_full}


@dataclass(frozen=True)
class Neighbours(Peers):
    """Two threads on one GPU in place of two ranks."""

    meeting: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))
    brought: dict[int, Tensor] = field(default_factory=dict)

    def gather_copies(self, part: Tensor) -> Tensor:
        self.brought[self.rank] = part
        self.meeting.wait(60)
        whole = torch.stack([self.brought[0], self.brought[1]])
        self.meeting.wait(60)
        return whole

    def reduce(self, values: Tensor, how: str) -> Tensor:
        whole = self.gather_copies(values)
        return whole.amax(0) if how == "max" else whole.sum(0)


def check_divided_vocabulary() -> Iterator[tuple[str, bool, Numbers]]:
    """`fused` over two parts of a vocabulary is what `chunked` is there, and no further from all logits at once."""
    if "fused" not in WAYS:
        return
    logits = (torch.randn(2048, 128256, generator=torch.Generator(GPU).manual_seed(1), device=GPU) * 3).bfloat16()
    targets = drawn(2048, 8, 128256)[2]
    whole = logits.float().requires_grad_()
    right = torch.nn.functional.cross_entropy(whole, targets, reduction="none")
    (gradients,) = torch.autograd.grad(right.sum(), whole)
    found: dict[str, dict[str, float]] = {}
    for way, rows in (("fused", fused_rows_of_a_part), ("chunked", _plain_rows)):
        parts = [logits[:, :64128].contiguous(), logits[:, 64128:].contiguous()]
        losses = [torch.full_like(right, torch.nan) for _ in parts]
        first = Neighbours("", 0, 2)
        peers = (first, replace(first, rank=1))
        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(rows, parts[i], targets, losses[i], True, VocabularyPart(peers[i], 128256))
                     for i in (0, 1)]  # fmt: skip
            for call in calls:
                call.result()
        torch.cuda.synchronize()
        found[way] = {
            "losses": max(float((own - right).norm() / right.norm()) for own in losses),
            "gradients": float((torch.cat(parts, 1).float() - gradients).norm() / gradients.norm()),
        }
    good = found["fused"]["losses"] < 1e-5 and found["fused"]["gradients"] < 1.1 * found["chunked"]["gradients"] < 5e-3
    yield "fused: two parts of a vocabulary", good, found


def check_no_target() -> Iterator[tuple[str, bool, Numbers]]:
    hidden, weight, targets = drawn(4096, 256, 128256)
    for way in WAYS:
        found = computed(hidden, weight, torch.full_like(targets, -100), loss=way)
        yield f"{way}: without a target all is zero", not any(bool(x.any()) for x in found), {}


def check_bits() -> Iterator[tuple[str, bool, Numbers]]:
    """`deterministic=true` takes `chunked` and `fused` as they are."""
    inputs = drawn(6001, 512, 128256)
    for way in WAYS[1:]:
        torch.use_deterministic_algorithms(way == "chunked")  # it refuses an operation that is not
        first, second = (computed(*inputs, loss=way) for _ in range(2))
        torch.use_deterministic_algorithms(False)
        yield f"{way}: two runs give the same bits", all(map(torch.equal, first, second)), {}


def check_graph() -> Iterator[tuple[str, bool, Numbers]]:
    inputs = drawn(4104, 512, 128256)
    for way in WAYS[1:]:
        torch._dynamo.reset()

        def step(hidden: Tensor, weight: Tensor, targets: Tensor, way: str = way) -> Tensor:
            return linear_cross_entropy(hidden * 1.5, weight, targets, loss=way)

        plain, compiled = (computed(*inputs, step=f) for f in (step, torch.compile(step, fullgraph=True)))
        found = errors(compiled, plain)
        yield f"{way}: one graph, and the same numbers in it", max(found.values()) < 5e-3, {"errors": found}


def check_evaluation() -> Iterator[tuple[str, bool, Numbers]]:
    """Without gradients no way but `full` holds the logits."""
    inputs = drawn(8192, 1024, 128256)
    with torch.no_grad():
        right = float(linear_cross_entropy(*inputs, loss="full"))
        for way in WAYS[1:]:
            free_memory(GPU)
            before = torch.cuda.memory_allocated(GPU)
            loss = float(linear_cross_entropy(*inputs, loss=way))
            gib = (torch.cuda.max_memory_allocated(GPU) - before) / 2**30
            good = abs(loss / right - 1) < 1e-5 and gib < 2
            yield f"{way}: evaluation", good, {"error": abs(loss / right - 1), "gib": gib}


def measured(step: Callable[[], Any]) -> Numbers:
    """Milliseconds of a forward and a backward pass, the median of five after two, and GiB beyond the inputs."""
    free_memory(GPU)
    before, times = torch.cuda.memory_allocated(GPU), []
    for _ in range(7):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return {"ms": 1000 * median(times[2:]), "gib": (torch.cuda.max_memory_allocated(GPU) - before) / 2**30}


def contenders(inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, Callable[[], Any]]:
    torch._dynamo.reset()
    steps: dict[str, Callable[[], Any]] = {way: partial(computed, *inputs, loss=way) for way in WAYS}
    steps["full, compiled"] = partial(computed, *inputs, step=torch.compile(linear_cross_entropy), loss="full")
    if has_quack():
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        more = {"reduction": "sum", "use_scaled_exp": False, "tuned": False}
        steps["QuACK's own chunks"] = partial(computed, *inputs, step=chunked_linear_cross_entropy, **more)
    return steps


def check_cost() -> Iterator[tuple[str, bool, Numbers]]:
    """The ways without all logits need less than half of the memory."""
    for name, shape in SHAPES.items():
        found = {way: measured(step) for way, step in contenders(drawn(*shape)).items()}
        for way, numbers in found.items():
            good = way not in WAYS[1:] or numbers["gib"] < 0.5 * found["full"]["gib"]
            yield f"{way}: {name}, {shape[0]} × {shape[1]} × {shape[2]}", good, numbers


CHECKS = (
    check_gradients,
    check_divided_vocabulary,
    check_no_target,
    check_bits,
    check_graph,
    check_evaluation,
    check_cost,
)


def spelled(numbers: Numbers) -> str:
    return ", ".join(
        f"{key} ({spelled(value)})" if isinstance(value, dict) else f"{key} {value:.3g}"
        for key, value in numbers.items()
    )


def main() -> int:
    options = results.command_line(__doc__, accelerator=None).parse_args()
    environment, _ = results.measured_on("cuda", options.commit)
    if not has_quack():
        print("fused: left out, since quack-kernels is not installed")
    rows = []
    for check in CHECKS:
        try:
            for name, good, numbers in check():
                rows.append({"check": name, "ok": good, **numbers})
                print(f"{'ok' if good else 'FAILED':7}{name}: {spelled(numbers)}", flush=True)
        except Exception as error:  # the others still say what they find
            rows.append({"check": check.__name__, "ok": False, "error": f"{type(error).__name__}: {error}"[:500]})
            print(f"FAILED {check.__name__}: {rows[-1]['error']}", flush=True)
        torch.cuda.empty_cache()
    content = {"command": "python benchmarks/gpu_checks/loss.py", "environment": environment, "checks": rows}
    results.write(options.out / "loss-gpu-checks.json", content)
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
