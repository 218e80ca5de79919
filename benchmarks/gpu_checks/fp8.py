"""What only a GPU can show of `precision=fp8`: gradients beside bf16's, speed, memory, and runs on two GPUs.

    python benchmarks/gpu_checks/fp8.py                          all: two minutes, half of it compiling
    python benchmarks/gpu_checks/fp8.py --only 'products|kept'
    python benchmarks/gpu_checks/fp8.py --accelerator cpu        tries it out anywhere, with small layers, by emulation

Prints a line for each check, writes benchmarks/results/fp8-gpu-checks.json after each, and ends with 1 if one fails.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.device import free_memory, peaks_gib, wait_for  # noqa: E402
from recipes.language_modeling.model import Transformer  # noqa: E402
from shardwise.config.compose import compose  # noqa: E402
from shardwise.config.groups import Float8Config  # noqa: E402
from shardwise.parallel.float8 import Float8Layers  # noqa: E402
from shardwise.parallel.parallelize import parallelize, prepare_float8  # noqa: E402
from shardwise.parallel.units import find_units  # noqa: E402
from shardwise.plan import Host, Plan  # noqa: E402
from shardwise.plan.resolve import make_plan  # noqa: E402

RECIPES = ("tensorwise", "rowwise")
Result = tuple[bool, dict[str, Any]]


@dataclass(frozen=True)
class Size:
    """A Llama of 1.5 billion parameters has 24 such layers."""

    dim: int = 2048
    heads: int = 16
    ffn: int = 8192
    layers: int = 6
    length: int = 8192
    batch: int = 2
    # Inputs and outputs of single layers: those of models of 124 M, 1 B and 8 B
    shapes: tuple[tuple[int, int], ...] = ((768, 3072), (2048, 512), (2048, 2048), (4096, 1024), (4096, 14336))


TINY = Size(dim=64, heads=2, ffn=96, layers=2, length=48, shapes=((64, 96),))


@dataclass(frozen=True)
class Bench:
    device: torch.device
    size: Size
    emulated: bool

    def plan(self, precision: str, compile: str) -> Plan:
        """`precision`: bf16, or fp8's recipe."""
        words = [f"precision={precision}"] if precision == "bf16" else [
            "precision=fp8", f"precision.fp8.recipe={precision}", "precision.fp8.min_features=16",
            f"precision.fp8.emulate={str(self.emulated).lower()}",
        ]  # fmt: skip
        argv = ["recipe=custom", "module._target_=a.B", "data._target_=a.C", "micro_batch_size=1",
                "max_steps=1", "global_batch_size=1", "devices=1", f"accelerator={self.device.type}",
                f"compile={compile}"]  # fmt: skip
        return make_plan(
            compose([*argv, *words]).jobs[0].config, Host(cuda_devices=torch.cuda.device_count(), run_id="checks")
        )

    def model(self, precision: str, compile: str) -> Transformer:
        """As `ddp` prepares it: masters in fp32, the layers on copies in bf16 of what is not fp8."""
        torch.manual_seed(0)
        size, plan = self.size, self.plan(precision, compile)
        with torch.device(self.device):
            model = Transformer(64, size.dim, size.layers, size.heads, size.heads // 2, size.ffn, size.length)
        nn.init.normal_(model.embedding.weight)  # a residual stream as in a trained model, which layers add little to
        model.norm.bfloat16()  # `ddp` does that in the step, with what is in no layer
        float8 = prepare_float8(model, plan)
        copied: Callable[[nn.Parameter], bool] = lambda p: float8 is None or not float8.cast_from_master(p)  # noqa: E731
        parallelize(model, find_units(model), plan, copied=copied, casts_inputs=True)
        return model

    def step(self, model: Transformer) -> tuple[Tensor, Tensor]:
        """Loss, and all gradients of the layers in one vector, freed."""
        generator = torch.Generator(self.device).manual_seed(1)
        shape = (self.size.batch, self.size.length)
        tokens = torch.randint(0, 64, shape, generator=generator, device=self.device)
        direction = torch.randn(*shape, self.size.dim, generator=generator, device=self.device).bfloat16()
        with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
            loss = (model(tokens) * direction).float().mean()
        loss.backward()
        found = [p.grad for p in model.blocks.parameters() if p.grad is not None]
        model.zero_grad()
        return loss.detach(), torch.cat([gradient.flatten() for gradient in found])

    def milliseconds(self, step: Callable[[], Any], times: int = 7) -> float:
        found = []
        for _ in range(times + 3):
            wait_for(self.device)
            begin = time.perf_counter()
            step()
            wait_for(self.device)
            found.append(time.perf_counter() - begin)
        return 1000 * median(found[3:])


def gradients(bench: Bench, recipe: str) -> Result:
    """One layer beside bf16 and beside fp8 by emulation, eager and compiled: the gradient's norm and its direction.

    One layer: over several the rounding multiplies, and what is left of the direction says little about the kernels.
    """
    bench = replace(bench, size=replace(bench.size, layers=1))
    ours = {
        "bf16": bench.step(bench.model("bf16", "none")),
        "emulated": bench.step(replace(bench, emulated=True).model(recipe, "none")),
        "eager": bench.step(bench.model(recipe, "none")),
        "compiled": bench.step(bench.model(recipe, "layer")),
    }
    numbers: dict[str, Any] = {f"loss, {kind}": float(loss) for kind, (loss, _) in ours.items()}
    for kind in ("eager", "compiled"):
        for other in ("bf16", "emulated"):
            numbers[f"cosine, {kind} to {other}"] = cosine(ours[kind][1], ours[other][1])
        numbers[f"norm's ratio, {kind} to bf16"] = float(ours[kind][1].norm() / ours["bf16"][1].norm())
    numbers["cosine, compiled to eager"] = cosine(ours["compiled"][1], ours["eager"][1])
    holds = all(number > (0.98 if "bf16" in name else 0.995) for name, number in numbers.items() if "cosine" in name)
    return holds and all(abs(v - 1) < 0.02 for name, v in numbers.items() if "ratio" in name), numbers


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.double(), b.double()) / (a.double().norm() * b.double().norm()))


def layers(bench: Bench) -> Result:
    """Time and peak memory of a forward and backward pass over compiled layers of a model of 1.5 billion parameters."""
    numbers: dict[str, Any] = {}
    for precision in ("bf16", *RECIPES):
        torch._dynamo.reset()
        free_memory(bench.device)
        model = bench.model(precision, "layer")
        numbers[precision] = {"ms": bench.milliseconds(partial(bench.step, model))} | peaks_gib(bench.device)
    gains = {recipe: numbers["bf16"]["ms"] / numbers[recipe]["ms"] for recipe in RECIPES}
    return bench.emulated or gains["tensorwise"] > 1.1, numbers | {"times as fast": gains}


def kept(bench: Bench) -> Result:
    """What compiled layers keep for their backward pass: no copy of a weight, only the masters themselves."""
    numbers, holds = {}, True
    for recipe in RECIPES:
        torch._dynamo.reset()
        model = bench.model(recipe, "layer")
        masters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes = {p.numel() for p in model.blocks.parameters() if p.ndim == 2}
        copies: list[int] = []

        def note(tensor: Tensor) -> Tensor:
            if tensor.numel() in sizes and tensor.ndim == 2 and tensor.untyped_storage().data_ptr() not in masters:  # noqa: B023
                copies.append(tensor.numel() * tensor.itemsize)  # noqa: B023
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            bench.step(model)
        numbers[recipe] = {"copies": len(copies), "MiB": sum(copies) / 2**20}
        holds = holds and not copies
    return holds, numbers


def products(bench: Bench, shape: tuple[int, int]) -> Result:
    """One compiled linear layer over 16,384 rows in bf16 and fp8: whether a layer of this size gains."""
    numbers = {}
    for kind in ("bf16", *RECIPES):
        torch._dynamo.reset()
        with torch.device(bench.device):
            layer = nn.Sequential(nn.Linear(*shape, bias=False))
            if kind == "bf16":
                layer = layer.bfloat16()
            else:
                Float8Layers(layer, Float8Config(kind, (), 16, bench.emulated)).compute()  # type: ignore[arg-type]
            rows = bench.size.batch * bench.size.length
            x = torch.randn(rows, shape[0], dtype=torch.bfloat16).requires_grad_()
            gradient = torch.randn(rows, shape[1], dtype=torch.bfloat16)
        run = torch.compile(layer, dynamic=False)
        numbers[kind] = bench.milliseconds(lambda: run(x).backward(gradient))  # noqa: B023
    return True, {f"{kind} ms": ms for kind, ms in numbers.items()} | {
        f"{recipe} times as fast": numbers["bf16"] / numbers[recipe] for recipe in RECIPES
    }


def train(bench: Bench, folder: Path, name: str, steps: int, *words: str) -> list[float]:
    """`python train.py`: the losses of the steps of this run."""
    model = ["model.dim=512", "model.n_layers=4", "model.n_heads=8", "model.n_kv_heads=4", "model.ffn_dim=1536"]
    if bench.emulated:
        model = ["model.dim=32", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=1", "model.ffn_dim=48"]
    length = 64 if bench.emulated else 512
    argv = [
        sys.executable, str(ROOT / "train.py"), *model, f"model.max_seq_len={length}", f"data.sequence_length={length}",
        f"accelerator={bench.device.type}", f"runs_dir={folder}", f"name={name}", f"max_steps={steps}",
        "micro_batch_size=4", "global_batch_size=16", "module.sample_tokens=0", "log_every_n_steps=1",
        "max_validation_batches=4", "schedule=none", "checkpoint.save_every_n_steps=null", *words,
    ]  # fmt: skip
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: exit code {done.returncode}: {done.stderr[-1500:]}")
    with (folder / name / "metrics.csv").open() as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row.get("train/loss")]


def training(bench: Bench, ranks: int) -> Result:
    """train.py under fsdp on several GPUs, in bf16 and fp8; the fp8 run goes on in bf16 under ddp."""
    fp8 = [
        "precision=fp8",
        *(["precision.fp8.emulate=true", "precision.fp8.min_features=16"] if bench.emulated else []),
    ]
    many = [f"devices={ranks}", "strategy=fsdp", *([] if bench.emulated else ["compile=layer"])]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        losses = {
            "bf16": train(bench, folder, "bf16", 20, *many, "precision=bf16"),
            "tensorwise": train(bench, folder, "tensorwise", 20, *many, *fp8),
            "rowwise": train(bench, folder, "rowwise", 20, *many, *fp8, "precision.fp8.recipe=rowwise"),
        }
        saved = next((folder / "tensorwise" / "checkpoints").glob("step*20"))
        on = train(bench, folder, "on", 22, f"devices={ranks}", "strategy=ddp", "precision=bf16", f"resume={saved}")
    last = {name: found[-1] for name, found in losses.items()}
    holds = all(abs(last[recipe] / last["bf16"] - 1) < 0.03 for recipe in RECIPES) and on[-1] < losses["bf16"][0]
    return holds, {"ranks": ranks, "last losses": last, "gone on in bf16": on}


def checks_of(bench: Bench) -> dict[str, Callable[[], Result]]:
    gpus = torch.cuda.device_count()
    every: dict[str, Callable[[], Result]] = {
        **{f"gradients, {recipe}": partial(gradients, bench, recipe) for recipe in RECIPES},
        "kept for the backward pass": partial(kept, bench),
        "layers of 1.5 B": partial(layers, bench),
    }
    for shape in bench.size.shapes:
        every[f"products, {shape[0]} × {shape[1]}"] = partial(products, bench, shape)
    every["training"] = partial(training, bench, 2 if bench.emulated else min(2, gpus))
    return every


def main() -> int:
    parser = results.command_line(__doc__)
    parser.add_argument("--only", default="", help="the checks that this expression finds")
    options = parser.parse_args()
    on_cpu = options.accelerator == "cpu"
    bench = Bench(torch.device(options.accelerator), TINY if on_cpu else Size(), emulated=on_cpu)
    environment, _ = results.measured_on(options.accelerator, options.commit)
    content: dict[str, Any] = {"environment": environment, "command": results.command(), "checks": {}}
    failed = 0
    for name, measure in checks_of(bench).items():
        if not re.search(options.only, name):
            continue
        begin = time.perf_counter()
        try:
            holds, numbers = measure()
        except Exception as error:  # the next check may still show something
            holds, numbers = False, {"error": f"{type(error).__name__}: {error}"[:2000]}
        torch._dynamo.reset()
        failed += not holds
        row = {"holds": holds, "seconds": round(time.perf_counter() - begin, 1), **numbers}
        content["checks"][name] = row
        results.write(options.out / "fp8-gpu-checks.json", content)
        print(f"{'ok    ' if holds else 'FAILED'} {name}: {json.dumps(numbers)}  ({row['seconds']} s)", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
