"""A run that goes on is the run that never stopped: every scheduler of torch, and every counter that a module can see.

Saved behind a step in the middle of an epoch, at its end, and where the run stops; with max_steps and max_epochs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader

from shardwise.config.compose import compose
from shardwise.errors import ConfigError
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.run_dir.files import checkpoint_path
from tests.harness.cells import fit
from tests.harness.processes import spawn

EPOCH, STEPS = 4, 12  # steps
MIDDLE, END = 6, 8  # in the second epoch

SCHEDULES: dict[str, Any] = {
    "StepLR": lambda o: schedulers.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 7], 0.5),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.8),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3, mode="triangular2"),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.5, total_iters=9),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 2),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 9, 2.0),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda n: 0.9**n),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda n: 0.9),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)]
    ),
    # Each monitors what is there when it is stepped: at once, over the epoch, or from validation
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=0),
}


class Module(LightningModule):
    def __init__(self, schedule: str, interval: str, frequency: int = 1, monitor: str = "") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.schedule = schedule
        self.config = {"interval": interval, "frequency": frequency} | ({"monitor": monitor} if monitor else {})
        self.seen: list[Any] = []  # what it is told, and what it trains with
        self.epochs_ended = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        group = self.optimizers().param_groups[0]  # type: ignore[union-attr]
        self.seen.append((self.current_epoch, batch_idx, self.global_step, self.epochs_ended, group["lr"],
                          group.get("momentum")))  # fmt: skip
        loss = self.net(batch).pow(2).mean() * (1 + batch_idx % 3)  # up and down
        self.log("at_once", loss, on_step=True, on_epoch=False)
        self.log("mean", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validated", self.net(batch).pow(2).mean() * (1 + self.global_step % 5), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.epochs_ended += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["epochs_ended"] = self.epochs_ended

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.epochs_ended = checkpoint["epochs_ended"]

    def on_fit_end(self) -> None:
        Module.finished = self.seen, self.trainer.current_epoch

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": SCHEDULES[self.schedule](optimizer), **self.config},
        }


class Regrouped(Module):
    """The same with another optimizer: half the learning rate, and one group more."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": list(layer.parameters())} for layer in (self.net[0], self.net[2])]
        optimizer = torch.optim.Adam(groups, 0.05)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": SCHEDULES[self.schedule](optimizer), **self.config},
        }


class Data(LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        rows = torch.randn(4 * EPOCH, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(rows, batch_size=self.batch_size, shuffle=True)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Any]:
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


def plan_for(run_dir: Path, ranks: int, module: list[Any], *words: str) -> Plan:
    run_dir.mkdir(parents=True, exist_ok=True)
    arguments = [
        f"module.{k}={v}" for k, v in zip(("schedule", "interval", "frequency", "monitor"), module, strict=False)
    ]
    argv = [
        "recipe=custom", f"module._target_={__name__}.Module", f"data._target_={__name__}.Data", "units=[]", *arguments,
        "+data.batch_size=${micro_batch_size}", f"runs_dir={run_dir.parent}", f"name={run_dir.name}", "accelerator=cpu",
        f"devices={ranks}", "global_batch_size=4", f"micro_batch_size={2 // ranks}", "checkpoint.monitor=null",
        "checkpoint.keep_last=9", "log_every_n_steps=100", *words,
    ]  # fmt: skip
    return make_plan(compose(argv).jobs[0].config, Host(cuda_devices=0))


def one(run_dir: Path, ranks: int, module: list[Any], *words: str) -> dict[str, Any]:
    Module.finished = [], 0
    final = fit(plan_for(run_dir, ranks, module, *words))["final"]
    dist.barrier()
    seen, epoch = Module.finished
    return {"final": final, "seen": seen, "epoch": epoch}


def deviations(folder: Path, ranks: int, module: list[Any], limit: str, *words: str) -> list[str]:
    """What is other in runs that were stopped than in one that was not."""
    unit = 1 if limit == "max_steps" else EPOCH
    every = "checkpoint.save_every_n_steps=2"
    straight = one(folder / "straight", ranks, module, f"{limit}={STEPS // unit}", every, *words)
    found = []
    for step in (MIDDLE, END):
        resumed = {}
        if step == MIDDLE or len(module) == 4:
            resume = f"resume={checkpoint_path(folder / 'straight', step)}"
            resumed["died"] = one(folder / f"died-{step}", ranks, module, f"{limit}={STEPS // unit}", resume, *words)
        if step == END or (limit == "max_steps" and len(module) == 4):
            # Where a run stops it is saved last of all, and not within the step
            stopped = folder / f"stopped-{step}"
            one(stopped, ranks, module, f"{limit}={step // unit}", "checkpoint.save_every_n_steps=null", *words)
            resume = f"resume={checkpoint_path(stopped, step)}"
            resumed["stopped"] = one(stopped, ranks, module, f"{limit}={STEPS // unit}", resume, *words)
        for how, run in resumed.items():
            rest = straight["seen"][-len(run["seen"]) :]
            if len(run["seen"]) != 2 * (STEPS - step) or run["seen"] != rest or run["epoch"] != straight["epoch"]:
                found.append(f"{how} at {step}: saw {run['seen'][:3]}…, not {rest[:3]}… ({run['epoch']})")
            if not all(torch.equal(run["final"][key], value) for key, value in straight["final"].items()):
                found.append(f"{how} at {step}: other weights")
    return found


def each(folder: Path, ranks: int, cases: list[Any]) -> dict[str, list[str]]:
    """In each rank."""
    found = {}
    for number, (module, limit, *words) in enumerate(cases):
        found[f"{module} {limit} {words}"] = deviations(folder / str(number), ranks, module, limit, *words)
    return found


CASES: dict[str, list[Any]] = {
    "one": [
        *([[name, "step"], "max_steps"] for name in SCHEDULES if name != "ReduceLROnPlateau"),
        *([[name, "epoch"], "max_epochs"] for name in ("StepLR", "CyclicLR", "LambdaLR", "SequentialLR")),
        [["StepLR", "step", 3], "max_epochs"],
        [["ExponentialLR", "epoch", 2], "max_steps"],
    ],
    "plateau": [
        [["ReduceLROnPlateau", "step", 1, "at_once"], "max_steps"],
        [["ReduceLROnPlateau", "step", 2, "at_once"], "max_epochs"],
        [["ReduceLROnPlateau", "step", 2, "validated"], "max_steps", "validate_every_n_steps=2"],
        [["ReduceLROnPlateau", "epoch", 1, "mean"], "max_steps"],
        [["ReduceLROnPlateau", "epoch", 1, "mean"], "max_epochs"],
        [["ReduceLROnPlateau", "epoch", 1, "validated"], "max_steps"],
        [["ReduceLROnPlateau", "epoch", 1, "validated"], "max_steps", "validate_every_n_steps=2"],
    ],
}  # fmt: skip
TWO = [[["ReduceLROnPlateau", "epoch", 1, "mean"], "max_steps"], [["OneCycleLR", "step"], "max_epochs"]]


@pytest.mark.parametrize(("ranks", "cases"), [(1, CASES["one"]), (1, CASES["plateau"]), (2, TWO)])
def test_every_schedule_goes_on_as_if_it_had_not_stopped(tmp_path: Path, ranks: int, cases: list[Any]) -> None:
    for found in spawn(ranks, each, tmp_path, ranks, cases):
        assert len(found) == len(cases)
        assert {case: said for case, said in found.items() if said} == {}


def with_another_optimizer(folder: Path, schedule: str) -> list[list[float]]:
    """The learning rates of three runs: one with the first optimizer, one with the other, one that changes to it."""
    other = f"module._target_={__name__}.Regrouped"
    words = [f"max_steps={STEPS}", "checkpoint.save_every_n_steps=6"]
    runs = [
        one(folder / "first", 1, [schedule, "step"], *words),
        one(folder / "other", 1, [schedule, "step"], *words, other),
    ]
    resume = [f"resume={checkpoint_path(folder / 'first', MIDDLE)}", "resume_allow=[optimizer]"]
    runs.append(one(folder / "changed", 1, [schedule, "step"], *words, other, *resume))
    return [[seen[4] for seen in run["seen"]][-2 * (STEPS - MIDDLE) :] for run in runs]


def each_with_another_optimizer(folder: Path) -> dict[str, list[list[float]]]:
    return {name: with_another_optimizer(folder / name, name) for name in ("LambdaLR", "StepLR", "ChainedScheduler")}


def test_another_optimizer_has_the_rates_that_it_would_have_had_from_the_start(tmp_path: Path) -> None:
    """Its schedule is where the old one was, and its learning rate and groups are its own."""
    (rates,) = spawn(1, each_with_another_optimizer, tmp_path)
    for name, (first, other, changed) in rates.items():
        assert changed == pytest.approx(other) and changed != first, name


def refusals(folder: Path) -> list[str]:
    """What runs of 20 steps say whose OneCycleLR has 13: a new one, and two that go on."""
    one(folder / "run", 1, ["OneCycleLR", "step"], f"max_steps={MIDDLE}")
    one(folder / "epochs", 1, ["OneCycleLR", "step"], "max_epochs=1")
    said = []
    for name, words in (
        ("new", ["max_steps=20"]),
        ("run", ["max_steps=20", f"resume={checkpoint_path(folder / 'run', MIDDLE)}"]),
        ("epochs", ["max_epochs=5", f"resume={checkpoint_path(folder / 'epochs', EPOCH)}"]),
    ):
        with pytest.raises(ConfigError) as refused:
            one(folder / name, 1, ["OneCycleLR", "step"], *words)
        assert Module.finished == ([], 0)
        said.append(str(refused.value))
    last = one(folder / "run", 1, ["OneCycleLR", "step"], f"resume={checkpoint_path(folder / 'run', MIDDLE)}",
               f"max_steps={STEPS + 1}")  # fmt: skip
    return [*said, str(len(last["seen"]))]


def test_a_one_cycle_that_ends_before_the_run_is_refused_before_a_step_is_lost(tmp_path: Path) -> None:
    """torch raises in the middle of the run."""
    ((new, resumed, epochs, seen),) = spawn(1, refusals, tmp_path)
    lasts = "OneCycleLR with total_steps=13 lasts to step 13, and this run to step 20; give max_steps=13"
    assert f"Module.configure_optimizers: {lasts}, or total_steps=self.trainer.estimated_stepping_batches" in new
    assert f"step-00000006.ckpt: the checkpoint's {lasts}, with which" in resumed and "shardwise export" in resumed
    assert f"step-00000004.ckpt: the checkpoint's {lasts} max_epochs=null, with which" in epochs
    assert int(seen) == 2 * (STEPS + 1 - MIDDLE), "to its own end it goes on"


WHOLE = "micro_batch_size=4"  # a micro-batch a step
ENDS: list[Any] = [
    ("55, and this run to step 80; give max_steps=55 max_epochs=null", ["OneCycleLR", "epoch"], "max_epochs=20"),
    ("111, and this run to step 160; give max_steps=111", ["OneCycleLR", "epoch", 2], "max_steps=160", WHOLE),
    ("69, and this run to step 80; give max_steps=69", ["OneCycleLR", "step", EPOCH + 1], "max_steps=80", WHOLE),
    ("27, and this run to step 40; give max_steps=27", ["OneCycleLR", "step", 2], "max_steps=40"),
    ("15, and this run goes on; give max_steps=15", ["member", "step"], "max_steps=40"),
]


def ends(folder: Path) -> list[str]:
    """What runs say in which a OneCycleLR of 13 steps is over."""
    SCHEDULES["member"] = lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 2), SCHEDULES["OneCycleLR"](o)], [2]
    )
    said = []
    for number, (expected, case, *words) in enumerate(ENDS):
        with pytest.raises(ConfigError) as refused:
            one(folder / str(number), 1, case, *words)
        last = int(expected.partition(",")[0])
        one(folder / f"{number}-to-its-end", 1, case, *words[1:], f"max_steps={last}")
        with pytest.raises(ConfigError):
            one(folder / f"{number}-beyond", 1, case, *words[1:], f"max_steps={last + 1}")
        said.append(str(refused.value).partition("13 lasts to step ")[2].partition(", or")[0])
    return said


def test_a_one_cycle_that_is_called_now_and_then_ends_the_run_with_one_message(tmp_path: Path) -> None:
    """Before it starts, if it is known when the schedule is over, and otherwise there: torch would raise."""
    assert spawn(1, ends, tmp_path) == [[expected for expected, *_ in ENDS]]


def best_and_last(folder: Path) -> dict[str, list[int]]:
    """Links per file of each checkpoint."""
    words = ["max_steps=8", "checkpoint.save_every_n_steps=null", "checkpoint.monitor=validated",
             "checkpoint.mode=min"]  # fmt: skip
    one(folder / "run", 1, ["StepLR", "step"], *words)
    found = folder.glob("run/checkpoints/*.ckpt")
    return {path.name: [file.stat().st_nlink for file in path.iterdir()] for path in found}


def test_the_best_and_the_last_are_the_same_files(tmp_path: Path) -> None:
    (links,) = spawn(1, best_and_last, tmp_path)
    assert set(links["step-00000008.ckpt"]) == {2}, links
    assert set(links["best-00000008.ckpt"]) == {2}, links
