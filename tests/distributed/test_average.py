"""`ema_decay=`: an average of the weights that evaluation sees and training never does, whatever is sharded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.trainer import build_data, build_module, build_trainer
from tests.harness.cells import cell_plan, fit
from tests.harness.processes import spawn
from tests.harness.selected import needed

DECAY = 0.5
CELLS = {
    "ddp": ["strategy=ddp"],
    "fsdp": ["strategy=fsdp"],
    "zero3": ["strategy=zero3"],
    "zero3-large": ["strategy=zero3", "strategy.persistence_threshold_elements=0"],  # as large weights are
    "ddp bf16": ["strategy=ddp", "precision=bf16"],
    "zero1 bf16": ["strategy=zero1", "precision=bf16"],
    "tensor": ["strategy=fsdp", "strategy.tensor_parallel_size=2"],
    "context": ["strategy=fsdp", "strategy.context_parallel_size=2"],
}
WITHOUT = ["ddp", "fsdp", "zero3", "zero3-large", "ddp bf16"]


class Look(Callback):
    """An average of its own, of full master weights; and what evaluation and training find."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}
        self.seen: list[dict[str, Tensor]] = []  # by validation
        self.expected: list[dict[str, Tensor]] = []
        self.before: list[dict[str, Tensor]] = []  # of each validation
        self.after: list[dict[str, Tensor]] = []
        self.losses: list[float] = []
        self.step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = trainer.strategy.sharded.full_parameters()
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        weights = trainer.strategy.sharded.full_parameters()
        self.average = {n: DECAY * a + (1 - DECAY) * weights[n] for n, a in self.average.items()}
        self.before.append(weights)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(trainer.strategy.sharded.full_parameters())
        self.expected.append(dict(self.average))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.after.append(trainer.strategy.sharded.full_parameters())
        self.losses.append(float(trainer.callback_metrics["validation/loss"]))

    def found(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("seen", "expected", "before", "after", "losses", "shards")}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        average = trainer.strategy.sharded.average or {}
        self.shards = {name: shard.clone() for name, shard in average.items()}


def plan_for(run_dir: Path, *words: str) -> Plan:
    """Steps wide enough for the average and the weights to be far apart; two micro-batches each."""
    return cell_plan(run_dir, 2, "micro_batch_size=2", "global_batch_size=8", "max_steps=4", "optimizer=sgd",
                     "optimizer.lr=1.0", "schedule=none", "validate_every_n_steps=2", "checkpoint.save_every_n_steps=2",
                     "checkpoint.keep_last=2", "model.n_kv_heads=2", "model.ffn_dim=42", *words)  # fmt: skip


def validate(plan: Plan) -> float:
    plan = dataclasses.replace(plan, stage="validate")
    module = build_module(plan)
    trainer = build_trainer(plan, module)
    trainer.validate(module, datamodule=build_data(plan), ckpt_path=plan.resume, weights_only=True, verbose=False)
    return float(trainer.callback_metrics["validation/loss"])


def message(run: Any) -> str:
    try:
        run()
    except ConfigError as error:
        return str(error)
    return "none"


def run_all(folder: Path, names: set[str] | None) -> dict[str, dict[str, Any]]:
    """In each rank: these cells, without and with an average, gone on with, and evaluated from their checkpoints."""
    cells: dict[str, dict[str, Any]] = {}
    ema = f"ema_decay={DECAY}"
    for name, words in CELLS.items():
        if names is not None and name not in names:
            continue
        cell: dict[str, Any] = {}
        home = folder / name.replace(" ", "-")
        first, second, last = (home / "checkpoints" / f"step-0000000{n}.ckpt" for n in (2, 4, 4))
        look, resumed = Look(), Look()
        fit(plan_for(home, *words, ema), look)
        cell["run"] = look.found()
        fit(plan_for(Path(f"{home}-resumed"), *words, ema, f"resume={first}"), resumed)
        cell["resumed"] = resumed.found()
        cell["validated"] = validate(plan_for(home, *words, ema, f"resume={second}"))
        cell["validated without"] = validate(plan_for(home, *words, f"resume={last}"))
        if name in WITHOUT:
            plain, look = Path(f"{home}-plain"), Look()
            fit(plan_for(plain, *words), look)
            cell["plain"] = look.found()
            wanted = plan_for(plain, *words, ema, "max_steps=5", f"resume={plain}/checkpoints/step-00000004.ckpt")
            cell["errors"] = [message(lambda plan=wanted: fit(plan)), message(lambda plan=wanted: validate(plan))]
        cells[name] = cell
    return cells


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return spawn(2, run_all, tmp_path_factory.mktemp("average"), needed(request, "name"))


def far(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference of any element."""
    assert first.keys() == second.keys()
    return max(float((tensor - second[name]).abs().max()) for name, tensor in first.items())


@pytest.mark.parametrize("name", CELLS)
def test_validation_sees_the_average_of_the_masters_and_training_does_not(runs: Any, name: str) -> None:
    for cells in runs:
        run = cells[name]["run"]
        assert len(run["seen"]) == len(run["after"]) == 2
        for n, (seen, expected) in enumerate(zip(run["seen"], run["expected"], strict=True)):
            assert far(seen, expected) <= 1e-6
            weights = run["before"][2 * n + 1]
            assert far(seen, weights) > 1e-3, "the average must differ from the weights"
            for parameter, tensor in run["after"][n].items():
                assert torch.equal(tensor, weights[parameter]), parameter


@pytest.mark.parametrize("name", WITHOUT)
def test_an_average_leaves_training_alone(runs: Any, name: str) -> None:
    cell = runs[0][name]
    for ours, theirs in zip(cell["run"]["before"], cell["plain"]["before"], strict=True):
        assert far(ours, theirs) == 0
    assert cell["plain"]["shards"] == {}


def test_validation_loss_is_the_same_under_every_strategy(runs: Any) -> None:
    for name in CELLS:
        expected = runs[0]["ddp bf16" if name.endswith("bf16") else "ddp"]["run"]["losses"]
        rel = 2e-4 if name.endswith("bf16") else 1e-5
        assert runs[0][name]["run"]["losses"] == pytest.approx(expected, rel=rel), name
        assert runs[1][name]["run"]["losses"] == pytest.approx(expected, rel=rel), name
    for name in ("ddp", "ddp bf16"):  # what would be measured without it is far beyond these bounds
        for with_it, without in zip(runs[0][name]["run"]["losses"], runs[0][name]["plain"]["losses"], strict=True):
            assert with_it != pytest.approx(without, rel=2e-3)


@pytest.mark.parametrize("name", CELLS)
def test_a_resumed_run_has_the_average_of_an_uninterrupted_one(runs: Any, name: str) -> None:
    for cells in runs:
        ours, theirs = cells[name]["resumed"], cells[name]["run"]
        assert ours["shards"].keys() == theirs["shards"].keys()
        for parameter, shard in theirs["shards"].items():
            assert torch.equal(ours["shards"][parameter], shard), parameter
        assert far(ours["seen"][-1], theirs["seen"][-1]) == 0
        assert ours["losses"][-1] == pytest.approx(theirs["losses"][-1], rel=1e-6)


@pytest.mark.parametrize("name", CELLS)
def test_validating_a_checkpoint_measures_what_the_run_did(runs: Any, name: str) -> None:
    """And without `ema_decay` the weights that training went on with."""
    for cells in runs:
        assert cells[name]["validated"] == pytest.approx(cells[name]["run"]["losses"][-1], rel=1e-6)
        plain = cells[f"ddp{name[name.find(' ') :] if ' ' in name else ''}"]["plain"]["losses"][-1]
        assert cells[name]["validated without"] == pytest.approx(plain, rel=2e-4 if " " in name else 1e-5)


@pytest.mark.parametrize("name", WITHOUT)
def test_a_checkpoint_without_an_average_is_one_message(runs: Any, name: str) -> None:
    for cells in runs:
        for told in cells[name]["errors"]:
            assert "ema_decay=0.5" in told and "no average" in told and "ema_decay=null" in told
