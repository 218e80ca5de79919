"""Modules that this repository has never seen, under every strategy: the same numbers as a plain loop."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from shardwise.config.paths import ROOT
from shardwise.errors import ConfigError
from shardwise.run_dir.checkpoints import list_checkpoints
from shardwise.trainer import build_module
from tests.harness import modules
from tests.harness.anybodys_module import (
    BOUNDS,
    BY_VALUE,
    CLIP,
    FP32_ONLY,
    KINDS,
    RANKS,
    bare_step,
    deviations,
    plan_for,
    run_all,
    words_for,
)
from tests.harness.cells import fit
from tests.harness.patience import run_patiently
from tests.harness.processes import spawn
from tests.harness.reference import update_deviation
from tests.harness.selected import needed

# Module, strategy and what the refusal says
REFUSED = [
    ("Clips", "zero1", "Clips has its own configure_gradient_clipping, and under zero1 gradients are in DeepSpeed's"),
    ("Watches", "zero2", "Watches.on_before_optimizer_step looks at gradients, and under zero2 they are"),
    ("Observed", "zero1", "GradientLogger.on_after_backward looks at gradients, and under zero1 they are in"),
    ("Skips", "fsdp", "Skips.on_train_batch_start returned -1, which skips the rest of the epoch"),
    ("Factored", "zero3", "Adafactor is not known to treat every weight by itself"),
    ("Searches", "ddp", "Searches uses LBFGS, which asks for the loss several times a step"),
    ("Penalized", "fsdp", "Penalized.training_step computes with weights outside the layers that own them"),
    ("Penalized", "zero3", "Penalized.training_step (modules.py, line "),
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
    (
        "Gan",
        "fsdp strategy.pipeline_parallel_size=2",
        "Gan optimizes by hand, which strategy.pipeline_parallel_size cannot",
    ),
    (
        "Gan",
        "fsdp strategy.tensor_parallel_size=2",
        "Gan optimizes by hand, which strategy.tensor_parallel_size cannot",
    ),
    *(("Untrained", strategy, "Untrained.configure_optimizers returned None") for strategy in ("ddp", "fsdp", "zero2")),
    *(
        ("Lazy", strategy, "Lazy has layers that get their shapes with the first")
        for strategy in ("ddp", "fsdp", "zero3")
    ),
    *(("Sparse", strategy, "words has sparse=True, and its gradients are sparse") for strategy in ("ddp", "zero2")),
    *(("Complex", strategy, f"phases holds complex numbers, and {strategy} ") for strategy in ("fsdp", "zero2")),
    ("Bare", "ddp data.kind=together", "a CombinedLoader gives batches of several loaders at once"),
    *(
        (
            "Unfilled",
            strategy,
            "Unfilled.init_module_weights(layer) leaves weights without values: layers.2.weight (LayerNorm), "
            "layers.2.bias (LayerNorm); a module that defines it is built without memory",
        )
        for strategy in ("ddp", "fsdp", "zero2", "zero3")
    ),
    (
        "Experts",
        "zero3",
        "Experts: experts.0.weight, experts.0.bias took no part in the loss, and did in earlier steps",
    ),
    *(
        ("Heads", strategy, "Heads uses different layers on different ranks: in training_step rank ")
        for strategy in ("fsdp", "zero1", "zero2", "zero3")
    ),
    ("Idle", "ddp", "Idle has parameters that took no part in the loss: give strategy.find_unused_parameters=true"),
]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    wanted = needed(request, "module")
    return {n: spawn(n, run_all, tmp_path_factory.mktemp(f"r{n}"), n, "cpu", wanted)[0] for n in (1, RANKS)}


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


def train_experts(folder: Path, ranks: int) -> dict[str, Any]:
    """In each rank: weights at the end, under some strategies, and, on one rank, under stock Lightning."""
    words = ["max_steps=6", "global_batch_size=8", "validate_every_n_steps=100"]
    unused = ["strategy.find_unused_parameters=true"] if ranks > 1 else []
    strategies = {"ddp": unused, "fsdp": ["units=[Linear]"]}
    found = {
        strategy: fit(plan_for(folder / f"{strategy}-{ranks}", "Experts", ranks, f"strategy={strategy}", *words, *more))
        for strategy, more in strategies.items()
    }
    done = {strategy: result["final"] for strategy, result in found.items()}
    if ranks == 1:
        module = build_module(plan_for(folder / "stock", "Experts", 1, *words))
        trainer = Trainer(
            max_steps=6, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module, datamodule=modules.Samples("pairs", 8))
        done["start"] = found["ddp"]["start"]
        done["stock"] = {name: p.detach() for name, p in module.named_parameters()}
    return done


def test_an_optimizer_leaves_alone_what_took_no_part(tmp_path: Path) -> None:
    """As stock Lightning's: neither decay nor momentum moves a weight without a gradient."""
    alone, together = spawn(1, train_experts, tmp_path, 1)[0], spawn(2, train_experts, tmp_path, 2)[0]
    stock = alone["stock"]
    for strategy in ("ddp", "fsdp"):
        for name in stock:
            assert torch.equal(alone[strategy][name], stock[name]), (strategy, name)
            torch.testing.assert_close(together[strategy][name], stock[name], rtol=0, atol=1e-6, msg=name)
    idle, busy = ([name for name in stock if ("experts.3" in name) == is_idle] for is_idle in (True, False))
    assert all(torch.equal(stock[name], alone["start"][name]) for name in idle)
    assert not any(torch.equal(stock[name], alone["start"][name]) for name in busy)


def train_heads(folder: Path, runs: list[tuple[str, str]]) -> dict[Any, Any]:
    """In each rank: weights at the end of each run, and the message of one that has none."""
    done: dict[Any, Any] = {}
    for number, (words, domains) in enumerate(runs):
        more = [f"+module.domains={domains}", "max_steps=12", "global_batch_size=8", "validate_every_n_steps=100"]
        try:
            done[words, domains] = fit(
                plan_for(folder / str(number), "Heads", RANKS, *words_for(words), *more)
            )["final"]  # fmt: skip
        except Exception as error:
            return done | {"said": f"{type(error).__name__}: {error}"}  # the other rank may wait for this one's end
    return done


def test_ranks_that_run_different_layers_train_as_the_message_advises_and_never_wrongly(tmp_path: Path) -> None:
    unused = "strategy.find_unused_parameters=true"
    advised = ["fsdp units=[]", f"zero1 {unused}", f"zero2 {unused}"]
    runs = [(f"ddp {unused}", "turns"), ("fsdp", "turns"), *((words, "apart") for words in (f"ddp {unused}", *advised))]
    done = spawn(RANKS, train_heads, tmp_path / "right", [*runs, ("ddp", "skips")])
    for words, domains in runs:
        for name, expected in done[0][f"ddp {unused}", domains].items():
            torch.testing.assert_close(done[0][words, domains][name], expected, rtol=0, atol=1e-6, msg=words)
    assert done[1]["said"].startswith("ConfigError: Heads has parameters that took no part in the loss: give strategy")
    late = spawn(RANKS, train_heads, tmp_path / "late", [("fsdp strategy.timeout_minutes=0.1", "late")])
    assert late[1]["said"].startswith(
        "ConfigError: Heads uses different layers on different ranks: in training_step rank 1 gathers last.1 where so "
        "far every rank gathers last.0, and the others did not follow in 0.05 minutes. Under fsdp all ranks gather"
    )


def detect_anomaly(folder: Path) -> str:
    try:
        fit(plan_for(folder, "Roots", 1, "debug.anomaly=true"))
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
            if module == "Moody" and key[1] != "ddp":
                continue  # a weight that takes no part in a step has no gradient on one rank, and one of zeros there
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
        "recipe=custom", "module._target_=tests.harness.modules.Forgetful", "accelerator=cpu", "name=run",
        "data._target_=tests.harness.modules.Samples", "data.kind=pairs", "data.batch_size=4",
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
