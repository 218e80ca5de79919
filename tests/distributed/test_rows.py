"""One step, one row: what the module logs stands with the run's own values, in metrics.csv and in every tracker."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shardwise.config.compose import compose
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.run_dir.events import read_events
from shardwise.trainer import build_data, build_module, build_trainer
from tests.harness.cells import fit
from tests.harness.processes import spawn

HERE = "tests.distributed.test_rows"
WORDS = [
    "recipe=custom", f"module._target_={HERE}.Logs", f"data._target_={HERE}.Numbers", "micro_batch_size=2",
    "global_batch_size=8", "log_every_n_steps=1", "accelerator=cpu", "units=[]", "checkpoint.save_every_n_steps=2",
    "checkpoint.save_at_end=false", "validate_every_n_steps=2", "deterministic=true",
]  # fmt: skip
TRACKED = [
    "logger=tensorboard", f"loggers.mine._target_={HERE}.Remember",
    "callbacks.rates._target_=lightning.pytorch.callbacks.LearningRateMonitor",
]  # fmt: skip
EPOCHS = ["max_steps=null", "max_epochs=2", "log_every_n_steps=4", "validate_every_n_steps=null", "module.rate=1e-6"]

SCHEDULED = [  # an epoch has three steps
    "optimizer=sgd", "optimizer.lr=1", "optimizer_override=true", "schedule=warmup_linear", "schedule.warmup_ratio=0.5",
    "max_steps=null", "validate_every_n_steps=null", "validate_every_n_epochs=2", "checkpoint.save_every_n_steps=null",
    "checkpoint.save_every_n_epochs=1", "gradient_clip_val=1e-9",
]  # fmt: skip


class Remember(Logger):
    """A tracker of the user's own."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    name = version = "remember"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        with self.path.with_suffix(".hparams").open("a") as file:
            file.write(str(params))


class Odd:
    """Neither a pickle nor YAML can hold it."""

    def __init__(self) -> None:
        self.function = lambda: 0


BY_RANK = ({"both": 1.0, "first": 2.0}, {"second": 3.0, "both": 5.0})


class Logs(LightningModule):
    def __init__(self, odd: Any = None, secret: str = "", rate: float = 0.001) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.rate = rate
        self.layer = nn.Linear(1, 1)
        self.seen: list[str] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.layer(batch) - batch).pow(2).mean()
        self.log("train/loss", loss, sync_dist=True, prog_bar=True)
        self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch))
        self.log("largest", batch.max(), reduce_fx="max", sync_dist=True)
        return loss

    def on_train_start(self) -> None:
        self.seen = [type(logger).__name__ for logger in self.loggers]
        if self.seen[0] == "TensorBoardLogger" and self.trainer.is_global_zero:
            self.logger.experiment.add_scalar("by hand", 1.0, 0)  # type: ignore[union-attr]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation/loss", self.layer(batch).mean(), sync_dist=True, on_step=True, on_epoch=True)
        if self.trainer.state.fn == "validate":
            for name, value in BY_RANK[self.global_rank].items():
                self.log(f"by_rank/{name}", value, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.rate)


class Numbers(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.arange(24.0).reshape(24, 1), batch_size=2)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.arange(8.0).reshape(8, 1), batch_size=2)  # type: ignore[arg-type]


def plan_of(run_dir: Path, *words: str) -> Plan:
    names = [f"runs_dir={run_dir.parent}", f"name={run_dir.name}", "devices=2"]
    run_dir.mkdir(parents=True, exist_ok=True)
    return make_plan(compose([*WORDS, *names, *words]).jobs[0].config, Host(cuda_devices=0))


def run_all(folder: Path) -> dict[str, Any]:
    os.environ["SOME_API_KEY"] = "0123456789"  # in the rank: its fork server may be older than this test
    mine = f"loggers.mine.path={folder / 'mine.jsonl'}"
    hparams = ["module.secret=0123456789", f"+module.odd._target_={HERE}.Odd"]
    fit(plan_of(folder / "whole", *TRACKED, *hparams, mine, "max_steps=7"))
    fit(plan_of(folder / "parts", "max_steps=5"))
    checkpoint = f"resume={folder / 'parts/checkpoints/step-00000004.ckpt'}"
    plan = plan_of(folder / "parts", "max_steps=7", checkpoint)
    fit(plan)
    fit(plan_of(folder / "few", "max_steps=4", "log_every_n_steps=3"))
    with redirect_stdout(io.StringIO()) as said:
        fit(plan_of(folder / "epochs", *EPOCHS, TRACKED[-1]))
    fit(plan_of(folder / "scheduled", *SCHEDULED, "max_epochs=2"))
    first = f"resume={folder / 'scheduled/checkpoints/step-00000003.ckpt'}"
    fit(plan_of(folder / "longer", *SCHEDULED, "max_epochs=3", first))
    last = f"resume={folder / 'longer/checkpoints/step-00000009.ckpt'}"
    fit(plan_of(folder / "over", *SCHEDULED, "max_epochs=3", last))
    fit(plan_of(folder / "blind", "max_steps=2", "max_validation_batches=0"))
    saved = f"resume={folder / 'blind/checkpoints/step-00000002.ckpt'}"
    fit(plan_of(folder / "blind", "max_steps=4", "max_validation_batches=0", saved))
    checked = plan_of(folder / "parts", "stage=validate", checkpoint, "logger=tensorboard")
    trainer = build_trainer(checked, module := build_module(checked))
    trainer.validate(module, datamodule=build_data(checked), ckpt_path=checked.resume, weights_only=True, verbose=False)
    if trainer.is_global_zero:
        (folder / "said.txt").write_text(said.getvalue())
    return {"seen": module.seen}


def rows(path: Path) -> list[dict[str, str]]:
    """Without what depends on the clock."""
    timed = ("seconds", "per_second", "goodput", "wait")
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if not k.endswith(timed)} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    spawn(2, run_all, folder)
    return folder


def test_a_step_has_one_row_with_the_modules_values_of_the_whole_window(folder: Path) -> None:
    whole = rows(folder / "whole/metrics.csv")
    steps = [row for row in whole if row["train/samples"]]
    assert [int(row["step"]) for row in steps] == list(range(1, 8))
    assert [int(row["step"]) for row in whole] == sorted(int(row["step"]) for row in whole if row["step"])
    for row in steps:
        assert float(row["train/loss"]) == pytest.approx(float(row["train/global_batch_loss"]), rel=1e-6)
        assert float(row["both_step"]) == pytest.approx(float(row["train/loss"]), rel=1e-6)
        assert float(row["largest"]) >= 7  # of 8 different numbers
    epochs = {int(row["step"]): float(row["both_epoch"]) for row in whole if row["both_epoch"]}
    assert list(epochs) == [3, 6, 7]
    for last, of_epoch in ((3, steps[:3]), (6, steps[3:6])):
        assert epochs[last] == pytest.approx(sum(float(row["train/loss"]) for row in of_epoch) / 3, rel=1e-6)
    assert [int(row["step"]) for row in whole if row["validation/loss_epoch"]] == [2, 4, 6]
    assert "validation/loss_step" not in whole[0]


def test_trackers_have_the_same_steps(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    expected = rows(folder / "whole/metrics.csv")
    board = EventAccumulator(str(folder / "whole/tensorboard")).Reload()
    mine = [json.loads(line) for line in (folder / "mine.jsonl").read_text().splitlines()]
    for key in ("train/loss", "train/global_batch_loss", "largest", "lr-SGD", "both_epoch", "validation/loss_epoch"):
        there = {int(row["step"]): float(row[key]) for row in expected if row[key]}
        assert {event.step: event.value for event in board.Scalars(key)} == pytest.approx(there), key
        assert {row["step"]: row[key] for row in mine if key in row} == pytest.approx(there), key
    assert "by hand" in board.Tags()["scalars"]
    assert "***" in (folder / "mine.hparams").read_text() and "0123" not in (folder / "mine.hparams").read_text()


def test_a_resumed_run_has_every_row_once(folder: Path) -> None:
    whole, parts = rows(folder / "whole/metrics.csv"), rows(folder / "parts/metrics.csv")
    for column in ("train/loss", "train/global_batch_loss", "largest", "validation/loss_epoch"):
        there = [(row["step"], row[column]) for row in whole if row[column]]
        assert [(row["step"], row[column]) for row in parts if row[column]] == there, column


def test_the_modules_values_come_at_the_steps_of_the_run(folder: Path) -> None:
    few = rows(folder / "few/metrics.csv")
    assert [int(row["step"]) for row in few if row["largest"]] == [1, 3, 4]


def test_the_last_step_of_max_epochs_has_a_row(folder: Path) -> None:
    steps = [row for row in rows(folder / "epochs/metrics.csv") if row["train/samples"]]
    assert [int(row["step"]) for row in steps] == [1, 4, 6]
    assert all(row["largest"] and row["lr-SGD"] for row in steps)
    last = json.loads((folder / "epochs/summary.json").read_text())
    for key in ("train/loss", "train/global_batch_loss"):  # the first is the module's own
        assert last[key] == float(steps[-1][key]), key
    assert "\nstep 6/6  loss " in (folder / "said.txt").read_text()


def test_a_schedule_under_max_epochs_has_the_steps_of_the_data(folder: Path) -> None:
    trained = [row for row in rows(folder / "scheduled/metrics.csv") if row["train/samples"]]
    assert [float(row["train/learning_rate"]) for row in trained] == pytest.approx([1 / 3, 2 / 3, 1, 1, 0.5, 0])
    # The first step after a resume has the rate that the checkpoint has, as under max_steps
    longer = [row for row in rows(folder / "longer/metrics.csv") if row["train/samples"]]  # 9, 5 of warm-up
    assert [float(row["train/learning_rate"]) for row in longer] == pytest.approx([1, 1, 1, 2 / 3, 1 / 3, 0])
    assert [event.data["steps"] for event in read_events(folder / "longer") if event.kind == "start"] == [9]


def test_a_run_with_nothing_left_to_train_ends_with_its_summary(folder: Path) -> None:
    summary = json.loads((folder / "over/summary.json").read_text())
    assert (summary["steps"], summary["parameters"]) == (9, 2)


def test_validations_and_saves_come_by_epochs(folder: Path) -> None:
    measured = [row["step"] for row in rows(folder / "scheduled/metrics.csv") if row["validation/loss_epoch"]]
    assert measured == ["6"]
    for run, steps in (("scheduled", (3, 6)), ("longer", (6, 9))):
        names = sorted(path.name for path in (folder / run / "checkpoints").glob("*.ckpt"))
        assert names == [f"step-{step:08d}.ckpt" for step in steps]


def test_a_line_and_the_table_show_what_is_true_of_the_moment(folder: Path) -> None:
    said = (folder / "said.txt").read_text()
    validations = [line.split()[2::2] for line in said.splitlines() if "validation/loss" in line]
    assert validations == [["validation/loss", "validation/loss_epoch"]] * 2  # nothing of the epoch before
    summary = json.loads((folder / "epochs/summary.json").read_text())
    last = rows(folder / "epochs/metrics.csv")[-1]
    for key in ("both_step", "largest"):  # of the window, not of its last micro-batch
        assert summary[key] == float(last[key]), key
    assert summary["both"] == summary["both_epoch"] == pytest.approx(float(last["both_epoch"]))
    assert re.search(r"^lr-SGD +1e-06$", said, re.MULTILINE)


def test_max_validation_batches_0_is_no_validation(folder: Path) -> None:
    columns = {key for row in rows(folder / "blind/metrics.csv") for key in row}
    assert "train/loss" in columns and not any("validation" in key for key in columns)
    saved = sorted(path.name for path in (folder / "blind/checkpoints").glob("*.ckpt"))
    assert saved == ["step-00000002.ckpt", "step-00000004.ckpt"]  # the default's monitor keeps no best


def test_another_stage_logs_beside_the_run(folder: Path) -> None:
    (row,) = rows(folder / "parts/metrics-validate.csv")
    assert row["step"] == "4" and row["validation/loss_epoch"]
    assert list((folder / "parts/tensorboard-validate").glob("events*"))


def test_ranks_may_log_other_names_in_another_order(folder: Path) -> None:
    """Lightning adds the first value of one rank to the first of another, whatever their names."""
    (row,) = rows(folder / "parts/metrics-validate.csv")
    by_rank = {name: float(row[f"by_rank/{name}"]) for name in ("both", "first", "second")}
    assert by_rank == {"both": 3.0, "first": 2.0, "second": 3.0}
