"""Modules that this repository has never seen, under every strategy, and the plain loop that they are compared with."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.config.compose import compose
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.trainer import build_module
from tests.harness import modules
from tests.harness.cells import fit
from tests.harness.reference import update_deviation

STEPS, MICRO, RANKS = 4, 4, 2
STRATEGIES = ["ddp", "fsdp", "fsdp_hybrid", "zero1", "zero2", "zero3"]
KINDS = {"ConvNet": "images", "CausalLM": "tokens", "Gan": "pairs", "Bare": "pairs", "Moody": "pairs", "Alone": "pairs",
         "Reader": "tokens"}  # fmt: skip
BOUNDS = {"fp32": (1e-4, 1e-5), "bf16": (0.15, 0.03)}  # of an update, of a buffer
FP32_ONLY = ("Bare", "Moody", "Alone")
CLIP = 0.01
BY_VALUE = [f"gradient_clip_val={CLIP}", "gradient_clip_algorithm=value"]


def plan_for(run_dir: Path, module: str, ranks: int, *words: str) -> Plan:
    run_dir.mkdir(parents=True, exist_ok=True)
    accumulate = 1 if module == "Gan" else 2
    argv = [
        "recipe=custom", f"module._target_=tests.harness.modules.{module}",
        "data._target_=tests.harness.modules.Samples", f"+data.kind={KINDS.get(module, 'pairs')}",
        "+data.batch_size=${micro_batch_size}", f"runs_dir={run_dir.parent}", f"name={run_dir.name}", "accelerator=cpu",
        f"devices={ranks}", f"max_steps={STEPS}", f"micro_batch_size={MICRO * RANKS // ranks}",
        f"global_batch_size={MICRO * RANKS * accumulate}", "checkpoint=none",
        f"validate_every_n_steps={STEPS}", "log_every_n_steps=1",
    ]  # fmt: skip
    return make_plan(compose([*argv, *words]).jobs[0].config, Host(cuda_devices=torch.cuda.device_count()))


def words_for(strategy: str) -> list[str]:
    strategy, *more = strategy.split()
    return [f"strategy={strategy}", *(["strategy.shard_size=2"] if strategy == "fsdp_hybrid" else []), *more]


def run_all(
    folder: Path, ranks: int, accelerator: str = "cpu", wanted: set[str] | None = None
) -> dict[tuple[str, str, str], dict[str, Any]]:
    """In each rank: every module × strategy × precision; of the `wanted` modules alone, if they are named."""
    cells = {}
    for module in [name for name in KINDS if wanted is None or name in wanted]:
        for strategy in STRATEGIES if ranks > 1 else ["ddp"]:
            if module == "Gan" and strategy.startswith("zero"):
                continue
            for precision in ("fp32", "bf16") if module not in FP32_ONLY else ("fp32",):
                run_dir = folder / f"{module}-{strategy}-{precision}"
                words = [*words_for(strategy), f"precision={precision}", f"accelerator={accelerator}"]
                if module == "Moody" and not strategy.startswith("fsdp"):
                    words.append("strategy.find_unused_parameters=true")
                plan = plan_for(run_dir, module, ranks, *words)
                cells[module, strategy, precision] = fit(plan)
    for strategy in ("ddp", "fsdp") if ranks > 1 and wanted is None else ():
        plan = plan_for(folder / f"clipped-{strategy}", "Bare", ranks, f"strategy={strategy}", *BY_VALUE,
                        f"accelerator={accelerator}")  # fmt: skip
        cells["Clipped", strategy, "fp32"] = fit(plan)
    return cells


def reference(module: str, folder: Path, zeros: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Start, final parameters and final buffers of the plain loop: the micro-batches of all ranks one after the other,
    since BatchNorm looks at one at a time; running statistics are those of rank 0's. `zeros`: see `bare_step`."""
    net: Any = build_module(plan_for(folder, module, RANKS))
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    data = modules.samples(KINDS[module], 40, 0)
    steps = {"ConvNet": conv_step, "CausalLM": text_step, "Gan": gan_step}
    steps.get(module, partial(bare_step, zeros=zeros))(net, data)
    return start, {n: p.detach() for n, p in net.named_parameters()}, dict(net.named_buffers())


def micro_batches(data: Any, step: int, accumulate: int) -> list[tuple[int, list[Tensor]]]:
    """(rank, micro-batch) of a step, in the order of the data set: ranks vary fastest."""
    size = MICRO * RANKS * accumulate
    first = step % (len(data) // size) * size
    return [
        (part % RANKS, list(data[first + part * MICRO : first + (part + 1) * MICRO]))
        for part in range(RANKS * accumulate)
    ]


def conv_step(net: Any, data: Any) -> None:
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=net.lr, momentum=0.9)
    statistics = [{n: b.clone() for n, b in net.named_buffers()} for _ in range(RANKS)]
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = net.lr * 0.5 ** (step // 2)
        optimizer.zero_grad()
        batches = micro_batches(data, step, 2)
        for rank, batch in batches:
            for name, buffer in net.named_buffers():
                buffer.copy_(statistics[rank][name])
            (F.cross_entropy(net(batch[0]), batch[1]) / len(batches)).backward()  # type: ignore[no-untyped-call]
            statistics[rank] = {n: b.clone() for n, b in net.named_buffers()}
        optimizer.step()
    for name, buffer in net.named_buffers():
        buffer.copy_(statistics[0][name])


def text_step(net: Any, data: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=net.lr, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = micro_batches(data, step, 2)
        for _, batch in batches:
            logits = net.lm(input_ids=batch[0]).logits[:, :-1]
            (F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten()) / len(batches)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def bare_step(net: Any, data: Any, clip: float = math.inf, *, zeros: bool = True) -> None:
    """`zeros`: what takes no part has a gradient of zero; else it has none."""
    optimizer = net.configure_optimizers()
    for step in range(STEPS):
        for p in net.parameters():
            p.grad = torch.zeros_like(p) if zeros else None
        batches = micro_batches(data, step, 2)
        for _, batch in batches:
            (net.loss(batch[0]) / len(batches)).backward()
        torch.nn.utils.clip_grad_value_(net.parameters(), clip)
        optimizer.step()


def gan_step(net: Any, data: Any) -> None:
    makers, judges = (torch.optim.SGD(part.parameters(), lr=net.lr) for part in (net.generator, net.discriminator))
    for step in range(STEPS):  # one a batch, though each of two optimizers steps in it
        real, noise = data[step * MICRO * RANKS : (step + 1) * MICRO * RANKS]
        judges.zero_grad()
        net.losses(real, noise)[0].backward()
        judges.step()
        makers.zero_grad()
        net.fooled(net.generator(noise)).backward()
        makers.step()


def deviations(module: str, cells: dict[Any, Any], folder: Path) -> dict[tuple[str, str], tuple[float, float]]:
    """(strategy, precision) -> the largest deviation from the plain loop of an update, and of a buffer."""
    references = {
        zeros: reference(module, folder / ("zeros" if zeros else "nothing"), zeros) for zeros in (False, True)
    }
    found = {}
    for (_, strategy, precision), cell in cells.items():
        start, final, buffers = references[strategy != "ddp"]
        where = f"{module} under {strategy} in {precision}"
        trained = [name for name in start if not torch.equal(start[name], final[name])]
        assert len(trained) >= len(start) - 2, where  # some are frozen, or take part in no step
        for name in set(start) - set(trained):
            rounded = strategy.startswith("zero") and precision == "bf16"  # DeepSpeed keeps masters of what it trains
            before = start[name].bfloat16().float() if rounded else start[name]
            assert torch.equal(cell["final"][name].float(), before), f"{where}: frozen {name} has moved"
        parts = ({name: weights[name] for name in trained} for weights in (start, cell["final"], final))
        assert cell["buffers"].keys() == buffers.keys()
        off = [0.0]
        for name, buffer in buffers.items():
            assert cell["buffers"][name].dtype == buffer.dtype, f"{where}: {name}"
            off.append(float((cell["buffers"][name].double() - buffer.double()).norm()
                             / buffer.double().norm().clamp(min=1e-6)))  # fmt: skip
        found[strategy, precision] = max(update_deviation(*parts).values()), max(off)
    return found
