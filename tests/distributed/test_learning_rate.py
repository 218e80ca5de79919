"""`find_learning_rate=true`: the rates and losses of Lightning's `lr_find`, under every strategy."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shardwise.callbacks.learning_rate import rate_of, suggest
from shardwise.config.compose import compose
from shardwise.plan import Host
from shardwise.plan.resolve import make_plan
from tests.harness.cells import fit
from tests.harness.commands import run
from tests.harness.processes import spawn

WORDS = ["recipe=custom", f"module._target_={__name__}.Regression", "find_learning_rate=true", "accelerator=cpu",
         "max_epochs=1", "schedule=none"]  # fmt: skip


class Regression(pl.LightningModule):
    """With a scheduler, which is not to set rates meanwhile, and a loss that diverges at a rate of about 1."""

    def __init__(self, scale: float = 1.0, batch_size: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        for parameter in self.net.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        x = torch.randn(48, 4, generator=generator)
        self.batch_size = batch_size
        self.data = TensorDataset(x, scale * x.sum(1, keepdim=True))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=self.batch_size)


class ByHand(Regression):
    automatic_optimization = False  # type: ignore[assignment]


def find(folder: Path, ranks: int, strategies: list[str], *words: str) -> dict[str, list[tuple[float, float]]]:
    """In each rank: the rate and the loss of every step."""
    found = {}
    for strategy in strategies:
        argv = [*WORDS, f"strategy={strategy}", f"devices={ranks}", f"runs_dir={folder}", f"name={strategy}",
                "micro_batch_size=2", "global_batch_size=4",
                "module.batch_size=2", *words]  # fmt: skip
        plan = make_plan(compose(argv).jobs[0].config, Host(cuda_devices=0))
        Path(plan.run_dir).mkdir(parents=True, exist_ok=True)
        fit(plan)
        torch.distributed.barrier()
        with (Path(plan.run_dir) / "learning_rate.csv").open() as file:
            found[strategy] = [(float(rate), float(loss)) for rate, loss in list(csv.reader(file))[1:]]
    return found


def find_as_lightning(folder: Path, scale: float) -> list[tuple[float, float]]:
    warnings.simplefilter("ignore")
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, max_epochs=99, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    found: Any = Tuner(trainer).lr_find(Regression(scale), update_attr=False)
    return list(zip(found.results["lr"], found.results["loss"], strict=True))


def test_its_rates_and_losses_are_lightnings_under_every_strategy(tmp_path: Path) -> None:
    expected = spawn(1, find_as_lightning, tmp_path, 1.0)[0]
    runs = spawn(1, find, tmp_path / "one", 1, ["ddp"])[0]
    runs |= spawn(2, find, tmp_path / "two", 2, ["fsdp", "zero2"])[0]
    assert len(expected) == 100 and len(runs) == 3
    for strategy, found in runs.items():
        for (rate, loss), (its_rate, its_loss) in zip(found, expected, strict=True):
            assert rate == pytest.approx(its_rate), strategy
            assert loss == pytest.approx(its_loss, rel=1e-3), strategy


def test_it_stops_where_the_loss_diverges(tmp_path: Path) -> None:
    expected = spawn(1, find_as_lightning, tmp_path, 30.0)[0]
    found = spawn(1, find, tmp_path / "one", 1, ["ddp"], "module.scale=30")[0]["ddp"]
    assert abs(len(found) - len(expected)) <= 1 and len(found) < 100
    # While it diverges, it doubles every difference
    assert [pytest.approx(loss, rel=1e-3) for _, loss in found[:80]] == [loss for _, loss in expected[:80]]


def test_the_rate_where_the_loss_falls_is_suggested() -> None:
    rates = [rate_of(step) for step in range(1, 101)]
    noise = torch.randn(100, generator=torch.Generator().manual_seed(0)).tolist()
    losses = [3 - 2.5 / (1 + (1e-3 / rate) ** 2) + 0.01 * noise[i] for i, rate in enumerate(rates)]  # falls at 1e-3
    found = suggest(rates, losses)
    assert found is not None and 1e-4 < found < 3e-2
    assert suggest(rates, sorted(losses)) is None


def test_a_module_that_optimizes_by_hand_and_a_run_to_go_on_with_are_refused(tmp_path: Path) -> None:
    words = [*WORDS, "micro_batch_size=4", "global_batch_size=4"]
    done = run(tmp_path, *words, f"module._target_={__name__}.ByHand")
    assert done.returncode == 2 and "ByHand optimizes by hand, and which rate belongs to its loss" in done.stderr
    done = run(tmp_path, *words, "resume=auto", "name=r")
    assert done.returncode == 2 and "rates of its own: leave out resume=auto" in done.stderr
