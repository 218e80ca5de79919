"""Modules that this repository has never seen, under every strategy: the same numbers as a plain loop."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.checkpoint.find import list_checkpoints
from shardwise.compose import ROOT, compose
from shardwise.errors import ConfigError
from shardwise.plan import Host, Plan, make_plan
from shardwise.trainer import build_module
from tests.distributed import modules
from tests.distributed.cells import fit
from tests.distributed.processes import spawn
from tests.patience import run_patiently
from tests.reference import update_deviation

STEPS, MICRO, RANKS = 4, 4, 2
STRATEGIES = ["ddp", "fsdp", "fsdp_hybrid", "zero1", "zero2", "zero3"]
KINDS = {"ConvNet": "images", "CausalLM": "tokens", "Gan": "pairs", "Bare": "pairs", "Moody": "pairs", "Alone": "pairs",
         "Reader": "tokens"}  # fmt: skip
BOUNDS = {"fp32": (1e-4, 1e-5), "bf16": (0.15, 0.03)}  # of an update, of a buffer
FP32_ONLY = ("Bare", "Moody", "Alone")
CLIP = 0.01
BY_VALUE = [f"gradient_clip_val={CLIP}", "gradient_clip_algorithm=value"]
# Module, strategy and what the refusal says
REFUSED = [
    ("Clips", "zero1", "Clips has its own configure_gradient_clipping, and under zero1 gradients are in DeepSpeed's"),
    ("Watches", "zero2", "Watches.on_before_optimizer_step looks at gradients, and under zero2 they are"),
    ("Observed", "zero1", "GradientLogger.on_after_backward looks at gradients, and under zero1 they are in"),
    ("Skips", "fsdp", "Skips.on_train_batch_start returned -1, which skips the rest of the epoch"),
    ("Factored", "zero3", "Adafactor is not known to treat every weight by itself"),
    ("Searches", "ddp", "Searches uses LBFGS, which asks for the loss several times a step"),
    ("Penalized", "fsdp", "Penalized.training_step computes with weights outside the layers that own them"),
    ("Penalized", "zero3", "Penalized.training_step computes with weights outside the layers that own them"),
    ("Alone", "ddp compile=layer", "compile=layer acts on the layers that repeat, and Alone has none"),
    ("Silent", "fsdp", "Silent.training_step returned None"),
    ("Detached", "ddp", "Detached.training_step returned a loss that has no gradient: it does not depend on the param"),
    ("Detached", "fsdp", "Detached.training_step returned a loss that has no gradient"),
    (
        "Gan",
        "ddp gradient_clip_val=1",
        "Gan optimizes by hand, so clipping is its own: use gradient_clip_val=null inst",
    ),
    (
        "Gan",
        "ddp global_batch_size=16",
        "Gan optimizes by hand, so accumulation is its own: global_batch_size=16 would",
    ),
    ("Gan", "zero2 gradient_clip_val=1", "Gan optimizes by hand, which zero2 cannot do"),
    ("Idle", "ddp", "Idle has parameters that took no part in the loss: give strategy.find_unused_parameters=true"),
]


def plan_for(run_dir: Path, module: str, ranks: int, *words: str) -> Plan:
    run_dir.mkdir(parents=True, exist_ok=True)
    accumulate = 1 if module == "Gan" else 2
    argv = [
        "recipe=custom", f"module._target_=tests.distributed.modules.{module}",
        "data._target_=tests.distributed.modules.Samples", f"+data.kind={KINDS.get(module, 'pairs')}",
        "+data.batch_size=${micro_batch_size}", f"runs_dir={run_dir.parent}", f"name={run_dir.name}", "accelerator=cpu",
        f"devices={ranks}", f"max_steps={STEPS}", f"micro_batch_size={MICRO * RANKS // ranks}",
        f"global_batch_size={MICRO * RANKS * accumulate}", "checkpoint=none",
        f"validate_every_n_steps={STEPS}", "log_every_n_steps=1",
    ]  # fmt: skip
    return make_plan(compose([*argv, *words]).jobs[0].config, Host(cuda_devices=torch.cuda.device_count()))


def words_for(strategy: str) -> list[str]:
    strategy, *more = strategy.split()
    return [f"strategy={strategy}", *(["strategy.shard_size=2"] if strategy == "fsdp_hybrid" else []), *more]


def run_all(folder: Path, ranks: int, accelerator: str = "cpu") -> dict[tuple[str, str, str], dict[str, Any]]:
    """In each rank: every module × strategy × precision."""
    cells = {}
    for module in KINDS:
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
    for strategy in ("ddp", "fsdp") if ranks > 1 else ():
        plan = plan_for(folder / f"clipped-{strategy}", "Bare", ranks, f"strategy={strategy}", *BY_VALUE,
                        f"accelerator={accelerator}")  # fmt: skip
        cells["Clipped", strategy, "fp32"] = fit(plan)
    return cells


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    return {n: spawn(n, run_all, tmp_path_factory.mktemp(f"r{n}"), n)[0] for n in (1, RANKS)}


def reference(module: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Start, final parameters and final buffers of the plain loop: the micro-batches of all ranks one after the other,
    since BatchNorm looks at one at a time; running statistics are those of rank 0's."""
    net: Any = build_module(plan_for(folder, module, RANKS))
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    data = modules.samples(KINDS[module], 40, 0)
    steps = {"ConvNet": conv_step, "CausalLM": text_step, "Gan": gan_step}
    steps.get(module, bare_step)(net, data)
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


def bare_step(net: Any, data: Any, clip: float = math.inf) -> None:
    """What takes no part has a gradient of zero."""
    optimizer = net.configure_optimizers()
    for step in range(STEPS):
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
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
    start, final, buffers = reference(module, folder)
    found = {}
    for (_, strategy, precision), cell in cells.items():
        where = f"{module} under {strategy} in {precision}"
        trained = [name for name in start if not torch.equal(start[name], final[name])]
        assert len(trained) >= len(start) - 1, where
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


@pytest.mark.parametrize("module", KINDS)
def test_every_strategy_equals_the_plain_loop(runs: dict[int, Any], tmp_path: Path, module: str) -> None:
    cells = {key: cell for key, cell in runs[RANKS].items() if key[0] == module}
    assert len(cells) == (6 if module in ("Gan", *FP32_ONLY) else 12)
    for (strategy, precision), (update, buffer) in deviations(module, cells, tmp_path).items():
        assert update <= BOUNDS[precision][0], (strategy, precision)
        assert buffer <= BOUNDS[precision][1], (strategy, precision)


def test_clipping_by_value_is_that_of_the_plain_loop(runs: dict[int, Any], tmp_path: Path) -> None:
    net: Any = build_module(plan_for(tmp_path, "Bare", RANKS))
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    bare_step(net, modules.samples("pairs", 40, 0), CLIP)
    final = {name: p.detach() for name, p in net.named_parameters()}
    for strategy in ("ddp", "fsdp"):
        clipped, free = (runs[RANKS][module, strategy, "fp32"]["final"] for module in ("Clipped", "Bare"))
        assert max(update_deviation(start, clipped, final).values()) <= BOUNDS["fp32"][0], strategy
        assert max(update_deviation(start, free, final).values()) > 0.1, strategy
    with pytest.raises(ConfigError, match="strategy=zero2 gradient_clip_algorithm=value: DeepSpeed bounds the norm"):
        plan_for(tmp_path, "Bare", RANKS, "strategy=zero2", *BY_VALUE)


def detect_anomaly(folder: Path) -> str:
    try:
        fit(plan_for(folder, "Roots", 1, "detect_anomaly=true"))
    except RuntimeError as error:
        return str(error)
    return "trained"


def test_detect_anomaly_names_the_forward_operation(tmp_path: Path) -> None:
    assert "MulBackward0' returned nan values" in spawn(1, detect_anomaly, tmp_path / "run")[0]


@pytest.mark.parametrize("module", KINDS)
def test_validation_is_the_same_on_one_rank_and_two(runs: dict[int, Any], module: str) -> None:
    for precision, bound in (("fp32", 1e-5), ("bf16", 2e-2)) if module not in FP32_ONLY else (("fp32", 1e-5),):
        if module == "ConvNet":  # its running statistics are those of other micro-batches on one rank
            one = runs[RANKS][module, "ddp", "fp32"]["validation"]["validation/loss"]
        else:
            one = runs[1][module, "ddp", precision]["validation"]["validation/loss"]
        for key, cell in runs[RANKS].items():
            if key[0] == module and key[2] == precision:
                assert cell["validation"]["validation/loss"] == pytest.approx(one, rel=bound), key


def test_the_rate_in_the_log_is_the_one_that_the_step_was_made_with(runs: dict[int, Any]) -> None:
    for (module, strategy, _), cell in runs[RANKS].items():
        if module == "ConvNet":
            assert cell["rates"] == pytest.approx([0.1, 0.1, 0.05, 0.05]), strategy


def run_refused(folder: Path) -> list[str]:
    """In each rank: what each of the refused says."""
    said = []
    for number, (module, strategy, _) in enumerate(REFUSED):
        try:
            fit(plan_for(folder / str(number), module, RANKS, *words_for(strategy)))
        except ConfigError as error:
            said.append(str(error))
        else:
            said.append("nothing")
    return said


def test_what_cannot_be_had_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    for said in spawn(RANKS, run_refused, tmp_path):
        for (_, _, expected), message in zip(REFUSED, said, strict=True):
            assert message.startswith(expected)


def test_a_mistake_that_only_a_rank_sees_is_one_message_and_leaves_no_folder(tmp_path: Path) -> None:
    words = [
        "recipe=custom", "module._target_=tests.distributed.modules.Forgetful", "accelerator=cpu", "name=run",
        "data._target_=tests.distributed.modules.Samples", "data.kind=pairs", "data.batch_size=4",
        "micro_batch_size=4", "global_batch_size=4", f"runs_dir={tmp_path}", "strategy=fsdp",
    ]  # fmt: skip
    done = run_patiently([sys.executable, "train.py", *words], 100, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "Forgetful has 2 optimizers, and automatic optimization steps one" in done.stderr
    assert not (tmp_path / "run").exists()


def with_two_optimizers(folder: Path) -> dict[str, str]:
    """Two optimizers of one kind are told apart by what they train."""
    said = {}
    fit(plan_for(folder / "a", "Gan", 1, "checkpoint.save_at_end=true"))
    (saved,) = list_checkpoints(folder / "a")
    for name, module, words in (
        ("same", "Gan", []), ("other", "Swapped", []), ("left", "Swapped", ["resume_allow=[optimizer]"]),
        ("shared", "Sharing", []),
    ):  # fmt: skip
        plan = plan_for(
            folder / name, module, 1, "checkpoint.save_at_end=true", *words, "max_steps=6", "global_batch_size=8"
        )
        resume = None if module == "Sharing" else str(saved)
        try:
            fit(dataclasses.replace(plan, resume=resume))
            said[name] = "done"
        except ConfigError as error:
            said[name] = str(error)
    return said


def test_an_optimizers_state_is_anothers_only_if_that_is_said(tmp_path: Path) -> None:
    said = spawn(1, with_two_optimizers, tmp_path)[0]
    assert said["same"] == said["left"] == "done"
    assert "discriminator.0.bias, discriminator.0.weight" in said["other"]
    assert "had another of its optimizers" in said["other"] and "resume_allow=[optimizer]" in said["other"]
    assert "Sharing: a parameter is in two optimizers" in said["shared"]
