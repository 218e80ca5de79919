"""Modules that step their optimizers themselves, and modules that clip their gradients themselves."""

from __future__ import annotations

import dataclasses
import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.callbacks.summary import plot_losses
from shardwise.errors import ConfigError, NonFiniteError
from shardwise.run_dir.checkpoints import list_checkpoints
from shardwise.run_dir.files import read_rows
from shardwise.step.precision_plugin import LOSS_SCALE
from shardwise.trainer import build_module
from tests.harness import modules
from tests.harness.anybodys_module import MICRO, RANKS, micro_batches, plan_for
from tests.harness.cells import fit
from tests.harness.processes import spawn
from tests.harness.reference import update_deviation

STEPS = 6
BY_HAND = ["max_steps=6", f"global_batch_size={MICRO * RANKS}", "validate_every_n_steps=3",
           "checkpoint.save_every_n_steps=3", "checkpoint.keep_last=9"]  # fmt: skip
CLIPS = ("Clips", "ClipsByValue", "Halves")


def run(folder: Path) -> dict[Any, Any]:
    """In each rank."""
    done: dict[Any, Any] = {}
    for strategy in ("ddp", "fsdp"):
        for precision in ("fp32", "fp16"):
            name = f"{strategy}-{precision}"
            plan = plan_for(folder / name, "ByHand", RANKS, f"strategy={strategy}", f"precision={precision}", *BY_HAND)
            small = patch.dict(LOSS_SCALE, init_scale=2.0**8)  # no step overflows
            with small, redirect_stdout(io.StringIO()) as said:
                done["ByHand", strategy, precision] = fit(plan) | {"said": said.getvalue()}
        for module in CLIPS:
            done[module, strategy] = fit(
                plan_for(folder / f"{module}-{strategy}", module, RANKS, f"strategy={strategy}")
            )
        resumed = plan_for(folder / f"{strategy}-resumed", "ByHand", RANKS, f"strategy={strategy}", *BY_HAND)
        first = list_checkpoints(folder / f"{strategy}-fp32")[0]
        done["resumed", strategy] = fit(dataclasses.replace(resumed, resume=str(first)))
    for module, words in (("Rests", []), ("Around", ["precision=fp16"]), ("Around", []), ("Diverges", [])):
        name = "-".join([module, *words]).replace("=", "-")
        try:
            done[name] = fit(plan_for(folder / name, module, RANKS, *words, *BY_HAND))
        except (ConfigError, NonFiniteError) as error:
            done[name] = str(error)
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hand")


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[Any, Any]:
    return spawn(RANKS, run, folder)[0]


def trained_by_hand(net: Any) -> dict[str, Tensor]:
    data = modules.samples("pairs", 40, 0)
    parts = [net.generator, net.discriminator]
    makers, judges = (torch.optim.SGD(part.parameters(), lr=net.lr) for part in parts)
    for step in range(STEPS):
        for optimizer in (makers, judges):
            optimizer.param_groups[0]["lr"] = net.lr * 0.7 ** (step // 2)
        at = step % 5 * MICRO * RANKS
        real, noise = data[at : at + MICRO * RANKS]
        judges.zero_grad()
        net.losses(real, noise)[0].backward()
        torch.nn.utils.clip_grad_norm_(net.discriminator.parameters(), 0.2)
        judges.step()
        if step % 5 % 2:
            makers.zero_grad()
            net.fooled(net.generator(noise)).backward()
            torch.nn.utils.clip_grad_value_(net.generator.parameters(), 0.005)
            makers.step()
    return {name: p.detach() for name, p in net.named_parameters()}


def trained_with_clipping(module: str, net: Any) -> dict[str, Tensor]:
    data, optimizer = modules.samples("pairs", 40, 0), net.configure_optimizers()
    for step in range(4):
        optimizer.zero_grad()
        batches = micro_batches(data, step, 2)
        for _, batch in batches:
            (net.loss(batch[0]) / len(batches)).backward()
        if module == "ClipsByValue":
            torch.nn.utils.clip_grad_value_(net.parameters(), 0.005)
        else:
            for p in net.parameters():
                p.grad.mul_(0.5 if module == "Halves" else 1.0)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3 if module == "Halves" else 0.01)
        optimizer.step()
    return {name: p.detach() for name, p in net.named_parameters()}


def off(cell: dict[str, Any], final: dict[str, Tensor]) -> float:
    return max(update_deviation(cell["start"], cell["final"], final).values())


def test_what_a_module_does_by_hand_equals_the_plain_loop(done: dict[Any, Any], tmp_path: Path) -> None:
    """Two optimizers, toggled; clipping by norm and by value; schedules; a step in every other batch."""
    final = trained_by_hand(build_module(plan_for(tmp_path, "ByHand", RANKS, *BY_HAND)))
    for strategy in ("ddp", "fsdp"):
        assert off(done["ByHand", strategy, "fp32"], final) <= 1e-5, strategy
        assert off(done["ByHand", strategy, "fp16"], final) <= 0.05, strategy
        assert off(done["resumed", strategy], final) <= 1e-5, strategy


def test_a_batch_is_a_step_however_many_optimizers_step_in_it(done: dict[Any, Any], folder: Path) -> None:
    for strategy in ("ddp", "fsdp"):
        saved = [path.name for path in list_checkpoints(folder / f"{strategy}-fp32")]
        assert saved == ["step-00000003.ckpt", "step-00000006.ckpt"]
        cell = done["ByHand", strategy, "fp32"]
        assert len(cell["losses"]) == STEPS
        for step in range(1, STEPS + 1):  # the module's own word, of that step
            (line,) = [line for line in cell["said"].splitlines() if line.startswith(f"step {step}/6  loss")]
            assert "  loss/critic " in line
    rows = read_rows(folder / "Rests" / "metrics.csv")
    assert [row["step"] for row in rows if row.get("train/samples")] == [str(n) for n in range(1, 7)]
    assert not any(row.get("train/loss") for row in rows)
    assert plot_losses(rows, {}, folder / "loss.png") == folder / "loss.png"


def test_clipping_of_the_modules_own_equals_the_plain_loop(done: dict[Any, Any], tmp_path: Path) -> None:
    for module in CLIPS:
        final = trained_with_clipping(module, build_module(plan_for(tmp_path / module, module, RANKS)))
        for strategy in ("ddp", "fsdp"):
            assert off(done[module, strategy], final) <= 1e-5, (module, strategy)


def test_what_cannot_be_right_is_refused(done: dict[Any, Any]) -> None:
    assert done["Around-precision-fp16"].startswith("precision=fp16 scales the gradients, and only the optimizers that")
    assert isinstance(done["Around"], dict)
    assert done["Diverges"].startswith("step 2: the loss that training_step returned is nan")
