"""What only a GPU can show of attention by keys: kernels that take queries for the last positions of more keys.

    python benchmarks/gpu_checks/last_positions.py             each kernel beside fp32, then time and memory

Context parallelism by keys has such queries (parallel/context_parallel.py). Writes
benchmarks/results/last-positions-gpu-checks.json. Ends with 1 if a check fails. fa4 needs flash-attn-4 installed.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.gpu_checks.attention import BOUND, Checks, Shape, drawn  # noqa: E402
from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.device import wait_for  # noqa: E402
from shardwise.nn.attention import causal_attention  # noqa: E402


def mask_of(queries: int, keys: int, device: torch.device) -> dict[str, Any]:
    """What the last positions look at, for kernels that need to be told: bool [1, 1, queries, keys]."""
    index = torch.arange(keys, device=device)
    return {"mask": (index[keys - queries :, None] >= index)[None, None]}


def cut(parts: list[Tensor], queries: int) -> tuple[list[Tensor], Tensor]:
    """Queries of the last positions with all keys and values, and the gradient of their output."""
    q, k, v, gradient = parts
    return [x.detach().requires_grad_() for x in (q[:, :, -queries:], k, v)], gradient[:, :, -queries:]


def exact(checks: Checks, shape: Shape, kernel: str, queries: int) -> tuple[bool, dict[str, Any]]:
    """The distance from fp32 by the norm, over the norm there."""
    parts = drawn(shape, checks.device, torch.bfloat16)
    mask, found = mask_of(queries, shape.length, checks.device), []
    for made, layout, word in ((parts, None, kernel), ([x.float() for x in parts], mask, "math")):
        leaves, gradient = cut(made, queries)
        out = causal_attention(*leaves, layout, word)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, gradient)])
    pairs = zip(("out", "dq", "dk", "dv"), *found, strict=True)
    numbers = {name: float((ours.float() - theirs).norm() / theirs.norm()) for name, ours, theirs in pairs}
    return max(numbers.values()) < BOUND, numbers


def cost(checks: Checks, shape: Shape, kernel: str, queries: int) -> tuple[bool, dict[str, Any]]:
    """Forward and backward, and the most memory besides what is given. `efficient` has a mask, which is given."""
    leaves, gradient = cut(drawn(shape, checks.device, torch.bfloat16), queries)
    layout = mask_of(queries, shape.length, checks.device) if kernel == "efficient" else None

    def step() -> None:
        torch.autograd.grad(causal_attention(*leaves, layout, kernel), leaves, gradient)

    step()
    wait_for(checks.device)
    torch.cuda.reset_peak_memory_stats()
    before, begin = torch.cuda.memory_allocated(), time.perf_counter()
    for _ in range(10):
        step()
    wait_for(checks.device)
    seconds = (time.perf_counter() - begin) / 10
    return True, {"ms": seconds * 1e3, "GiB": (torch.cuda.max_memory_allocated() - before) / 2**30}


def main() -> int:
    arguments = results.command_line(__doc__).parse_args()
    environment, _ = results.measured_on("cuda", arguments.commit)
    content = {"command": results.command(), "environment": environment, "bound": BOUND, "checks": {}}
    path = arguments.out / "last-positions-gpu-checks.json"
    checks = Checks(torch.device("cuda"), path, content, "")
    middle, long = Shape(2, 1024, 8, 2, 128), Shape(1, 65536, 32, 8, 128)
    for kernel in checks.words:
        if kernel in ("sdpa", "flash", "fa4"):
            for shape, queries in ((middle, 512), (Shape(2, 960, 8, 2, 64), 200)):
                name = f"exact, last {queries} of {shape.length} positions, {kernel}"
                checks.check(name, partial(exact, checks, shape, kernel, queries))
        if kernel in ("efficient", "flash", "fa4"):
            name = f"cost, last 4096 of {long.length} positions, {kernel}"
            checks.check(name, partial(cost, checks, long, kernel, 4096))
    print(f"{checks.failed} of {len(content['checks'])} checks failed; written: {path}", flush=True)
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
