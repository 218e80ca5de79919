"""Checks on one GPU what only a GPU shows of the optimizers: the compiled steps, that no step waits, memory and time.

    python benchmarks/gpu_checks/optimizers.py                             about a minute
    python benchmarks/gpu_checks/optimizers.py --accelerator cpu --tiny    tries it out anywhere

Prints a line for each check, ends with exit code 1 if one fails, and writes
benchmarks/results/optimizers-gpu-checks.json.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.device import free_memory, wait_for  # noqa: E402
from shardwise.optim.adamw import AdamW8bit, AdamWBf16  # noqa: E402
from shardwise.optim.muon import Muon  # noqa: E402

Optimizer = torch.optim.Optimizer
Make = Callable[[list[nn.Parameter]], Any]
BETAS, DECAY = (0.9, 0.95), 0.1
SHAPES = [(256, 512), (67, 896), (64, 32, 3, 3), (1024,), (257, 257)]  # the last two have fp32 state in AdamW8bit
STEPS = 10
DEVICE = torch.device("cuda")


def muon_of(parameters: list[nn.Parameter], dtype: str) -> Muon:
    groups = [{"params": [p for p in parameters if (p.ndim > 1) == (algorithm == "muon")], "algorithm": algorithm}
              for algorithm in ("muon", "adamw")]  # fmt: skip
    return Muon(groups, lr=0.01, weight_decay=DECAY, betas=BETAS, newton_schulz_dtype=dtype)


class TorchsMuon:
    """torch.optim.Muon for matrices, and torch.optim.AdamW for vectors. Kernels are flattened to matrices."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.flat = [(p, nn.Parameter(p.detach().flatten(1))) for p in parameters if p.ndim > 1]
        self.muon = torch.optim.Muon(
            [flat for _, flat in self.flat], lr=0.01, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"
        )
        self.adamw = torch.optim.AdamW([p for p in parameters if p.ndim < 2], lr=0.01, betas=BETAS, weight_decay=DECAY)

    def step(self) -> None:
        for p, flat in self.flat:
            assert p.grad is not None
            flat.grad = p.grad.flatten(1)
        self.muon.step()
        self.adamw.step()


def updates(make: Make, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """How STEPS steps change parameters of SHAPES, on the CPU. Start and gradients are the same on every device."""
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator) * 0.1 for shape in SHAPES]
    parameters = [nn.Parameter(start.to(device, dtype, copy=True)) for start in starts]
    optimizer = make(parameters)
    for _ in range(STEPS):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).mul(0.01).to(device, dtype)
        optimizer.step()
    return [p.detach().cpu().double() - start for p, start in zip(parameters, starts, strict=True)]


def distance(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """The largest over the tensors: norm of the difference over the norm of theirs."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def adamw_of(kind: Any, **more: Any) -> Make:
    return lambda parameters: kind(parameters, lr=0.01, betas=BETAS, weight_decay=DECAY, **more)


def same_as_on_the_cpu() -> dict[str, Any]:
    """The compiled step of a GPU computes what the plain operations of the CPU do."""
    makes: dict[str, tuple[Make, float]] = {
        "adamw_8bit": (adamw_of(AdamW8bit), 2e-3),
        "adamw_bf16": (adamw_of(AdamWBf16), 2e-3),
        "muon, float32": (lambda p: muon_of(p, "float32"), 2e-3),
    }
    found = {name: distance(updates(make, DEVICE), updates(make, torch.device("cpu"))) for name, (make, _) in
             makes.items()}  # fmt: skip
    return {"ok": all(found[name] <= bound for name, (_, bound) in makes.items()), **found}


def same_as_torchs_muon() -> dict[str, Any]:
    found = distance(updates(lambda p: muon_of(p, "bfloat16"), DEVICE), updates(TorchsMuon, DEVICE))
    return {"ok": found <= 1e-5, "distance": found}


def near_adamw() -> dict[str, Any]:
    """How far compact state leads away from AdamW, and how far torchao's does."""
    plain = updates(adamw_of(torch.optim.AdamW), DEVICE)
    found = {"adamw_8bit": distance(updates(adamw_of(AdamW8bit), DEVICE), plain),
             "adamw_bf16": distance(updates(adamw_of(AdamWBf16), DEVICE), plain)}  # fmt: skip
    ok = max(found.values()) < 0.05
    try:
        from torchao.optim import AdamW8bit as Torchaos

        found["torchao AdamW8bit"] = distance(updates(adamw_of(Torchaos), DEVICE), plain)
    except Exception as error:  # a package that is broken may raise anything
        return {"ok": ok, **found, "torchao AdamW8bit": f"{type(error).__name__}: {error}"[:200]}
    return {"ok": ok, **found}


def no_step_waits() -> dict[str, Any]:
    """A step that does not count changes nothing, and the host never waits for the device."""
    parameters = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in SHAPES]
    found = {}
    for name, make in {
        "adamw_8bit": adamw_of(AdamW8bit),
        "adamw_bf16": adamw_of(AdamWBf16),
        "muon": lambda p: muon_of(p, "bfloat16"),
    }.items():
        optimizer = make(parameters)
        optimizer.found_inf = torch.zeros((), device=DEVICE)
        for p in parameters:
            p.grad = torch.randn_like(p)
        optimizer.step()
        before = [t.clone() for t in tensors_of(optimizer, parameters)]
        skip = torch.ones((), device=DEVICE)
        for p in parameters:
            p.grad = torch.full_like(p, torch.nan)
        torch.cuda.set_sync_debug_mode("error") if DEVICE.type == "cuda" else None
        try:
            optimizer.found_inf = skip
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default") if DEVICE.type == "cuda" else None
        after = tensors_of(optimizer, parameters)
        found[name] = all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    return {"ok": all(found.values()), **found}


def tensors_of(optimizer: Optimizer, parameters: list[nn.Parameter]) -> list[Tensor]:
    return [p.detach() for p in parameters] + [t for p in parameters for t in optimizer.state[p].values()]


def shapes_of_a_model(tiny: bool) -> list[tuple[int, ...]]:
    """Those of Llama 3.2 1B."""
    dim, ffn, kv, layers, vocabulary = (64, 128, 32, 2, 512) if tiny else (2048, 8192, 512, 16, 128256)
    layer = [(dim, dim), (kv, dim), (kv, dim), (dim, dim), (ffn, dim), (ffn, dim), (dim, ffn), (dim,), (dim,)]
    return [(vocabulary, dim), *layer * layers, (dim,)]


def muon_of_model(parameters: list[nn.Parameter]) -> Muon:
    """The embedding, which is the first, is AdamW's."""
    hidden = [p for p in parameters[1:] if p.ndim > 1]
    others = [p for p in parameters if p.ndim < 2 or p is parameters[0]]
    groups = [{"params": hidden, "algorithm": "muon"}, {"params": others, "algorithm": "adamw"}]
    return Muon(groups, lr=1e-3, newton_schulz_dtype="bfloat16")


def time_and_memory(make: Make, tiny: bool) -> dict[str, Any]:
    """Seconds of a step, with another learning rate in each, and bytes of state and of what a step needs besides."""
    free_memory(DEVICE)
    parameters = [nn.Parameter(torch.randn(shape, device=DEVICE) * 0.02) for shape in shapes_of_a_model(tiny)]
    for p in parameters:
        p.grad = torch.randn_like(p) * 1e-3
    optimizer = make(parameters)
    started = time.perf_counter()
    optimizer.step()
    wait_for(DEVICE)
    first = time.perf_counter() - started
    held = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
    if held:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for number in range(12):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 / (number + 1)
        wait_for(DEVICE)
        started = time.perf_counter()
        optimizer.step()
        wait_for(DEVICE)
        seconds.append(time.perf_counter() - started)
    elements = sum(p.numel() for p in parameters)
    state = sum(t.nbytes for p in parameters for t in optimizer.state[p].values())
    besides = (torch.cuda.max_memory_allocated() - held) / 2**30 if held else None
    return {"first_step_seconds": first, "step_seconds": median(seconds[2:]), "parameters": elements,
            "state_bytes_per_parameter": state / elements, "gib_besides": besides}  # fmt: skip


def largest_sizes(tiny: bool) -> dict[str, Any]:
    makes: dict[str, tuple[Make, float]] = {  # with the most bytes of state per parameter
        "adamw": (adamw_of(torch.optim.AdamW, fused=True), 8.01),
        "adamw_8bit": (lambda p: AdamW8bit(p, lr=1e-3, betas=BETAS), 2.2 if tiny else 2.04),
        "adamw_bf16": (lambda p: AdamWBf16(p, lr=1e-3, betas=BETAS), 4.01),
        "muon": (muon_of_model, 8.0),
    }
    found: dict[str, Any] = {name: time_and_memory(make, tiny) for name, (make, _) in makes.items()}
    ok = all(found[name]["state_bytes_per_parameter"] <= most for name, (_, most) in makes.items())
    graphs = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return {"ok": ok and graphs <= 24, "graphs_compiled_by_all_checks": graphs, **found}


def words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {words(one)}" for key, one in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = results.command_line(__doc__)
    parser.add_argument("--tiny", action="store_true", help="sizes that fit anywhere")
    options = parser.parse_args()
    global DEVICE
    DEVICE = torch.device(options.accelerator)
    environment, device = results.measured_on(options.accelerator, options.commit)
    content: dict[str, Any] = {"command": "python benchmarks/gpu_checks/optimizers.py", "device": device,
                               "environment": environment, "checks": {}}  # fmt: skip
    for name, check in {
        "the same as on the CPU": same_as_on_the_cpu,
        "the same as torch.optim.Muon": same_as_torchs_muon,
        "near AdamW": near_adamw,
        "no step waits": no_step_waits,
        "a billion parameters": lambda: largest_sizes(options.tiny),
    }.items():
        started = time.perf_counter()
        try:
            found = check()
        except Exception as error:  # the next check runs even so
            found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
        found["seconds"] = round(time.perf_counter() - started, 1)
        content["checks"][name] = found
        shown = words({key: value for key, value in found.items() if key != "ok"})
        print(f"{'ok' if found['ok'] else 'FAILED'}  {name}: {shown}", flush=True)
        results.write(options.out / "optimizers-gpu-checks.json", content)
    return 0 if all(found["ok"] for found in content["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
