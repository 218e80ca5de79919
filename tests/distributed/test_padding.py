"""A padding batch leaves no trace in metrics, wherever they are kept, nor in what is logged; no rank waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.retrieval import RetrievalMAP

from shardwise.config.compose import compose
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.rank import run_stage
from tests.harness.cells import fit
from tests.harness.processes import spawn

RANKS, EPOCHS = 2, 3
SAMPLES = (
    5,
    2,
)  # of the loaders: the second rank has two batches of the first, one of them padding, and none of the other
FOUND: list[dict[str, float]] = []  # of each evaluation of this process


class Holder:
    def __init__(self) -> None:
        self.metrics = {"in a list": [torchmetrics.SumMetric()]}


class Model(LightningModule):
    """Counts the samples 1, 4, 7, ... of the first loader in metrics of all kinds, and each loader's by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.each = nn.ModuleList([torchmetrics.MeanMetric(), torchmetrics.MeanMetric()])
        self.retrieval = RetrievalMAP()  # gathers each element of its lists by itself
        self.numbers = torchmetrics.CatMetric()  # of numbers without a dimension
        self.named = {"sum": torchmetrics.SumMetric(), "deeper": [torchmetrics.SumMetric()]}
        self.listed = (torchmetrics.SumMetric(),)
        self.holder = Holder()
        self.late: torchmetrics.SumMetric | None = None  # made by the first batch

    def plain(self) -> dict[str, torchmetrics.SumMetric]:
        assert self.late is not None
        held: Any = self.holder.metrics["in a list"][0]
        named: Any = self.named
        return {"dict": named["sum"], "list in dict": named["deeper"][0], "tuple": self.listed[0], "object": held,
                "late": self.late}  # fmt: skip

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch[:, None]).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.each[dataloader_idx].update(batch)
        self.log("each", self.each[dataloader_idx])
        self.log("plainly", batch.mean(), sync_dist=True)
        self.late = self.late or torchmetrics.SumMetric()
        if dataloader_idx == 0:
            for metric in self.plain().values():
                metric.update(batch)
            self.retrieval.update(batch / 100, batch > 4, indexes=torch.zeros(len(batch), dtype=torch.long))
            self.numbers.update(batch.sum())

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return batch

    def on_validation_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("of the module", batch.mean(), sync_dist=True, on_epoch=True)

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self) -> None:
        metrics = {**self.plain(), "retrieval": self.retrieval, "numbers": self.numbers}
        FOUND.append({name: float(metric.compute().sum()) for name, metric in metrics.items()})
        for metric in metrics.values():
            metric.reset()

    on_test_epoch_end = on_validation_epoch_end

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Counts(Callback):
    def __init__(self) -> None:
        self.metrics = {name: torchmetrics.SumMetric() for name in ("before", "after")}

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *of_batch: Any) -> None:
        self.metrics["before"].update(of_batch[0])

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *of_batch: Any) -> None:
        self.metrics["after"].update(of_batch[1])
        pl_module.log("of the callback", of_batch[1].mean(), sync_dist=True, on_epoch=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take("callback")
        FOUND[-1] |= {name: float(value) for name, value in trainer.callback_metrics.items() if "dataloader" in name}

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        FOUND.append({})
        self._take("callback")

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end, on_test_end = on_validation_batch_end, on_validation_end

    def on_predict_batch_end(self, trainer: Trainer, pl_module: LightningModule, *of_batch: Any) -> None:
        self.metrics["after"].update(of_batch[1])

    def _take(self, owner: str) -> None:
        for name, metric in self.metrics.items():
            FOUND[-1][f"{owner}, {name}"] = float(metric.compute())
            metric.reset()


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(samples(8), batch_size=2)  # type: ignore[arg-type]

    def val_dataloader(self) -> list[DataLoader[Tensor]]:
        return [DataLoader(samples(count), batch_size=2) for count in SAMPLES]  # type: ignore[arg-type]

    test_dataloader = predict_dataloader = val_dataloader


def samples(count: int) -> Tensor:
    return torch.arange(count) * 3.0 + 1


def plan_for(folder: Path, *words: str) -> Plan:
    folder.mkdir(parents=True, exist_ok=True)
    argv = [
        "recipe=custom", f"module._target_={__name__}.Model", f"data._target_={__name__}.Data",
        f"+callbacks.counts._target_={__name__}.Counts", "data.batch_size=${micro_batch_size}",
        f"runs_dir={folder.parent}", f"name={folder.name}", "accelerator=cpu", f"devices={RANKS}",
        f"max_epochs={EPOCHS}", "global_batch_size=4", "micro_batch_size=2", "checkpoint=none",
        "checkpoint.monitor=null", "strategy.timeout_minutes=1", *words,
    ]  # fmt: skip
    return make_plan(compose(argv).jobs[0].config, Host(cuda_devices=0))


def run_all(folder: Path) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {}
    for strategy in ("ddp", "fsdp"):
        fit(plan_for(folder / strategy, f"strategy={strategy}"))
        found[strategy] = FOUND[:]
        FOUND.clear()
    for stage in ("test", "predict"):
        run_stage(plan_for(folder / stage, f"stage={stage}"))
        found[stage] = FOUND[:]
        FOUND.clear()
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[dict[str, float]]]]:
    return spawn(RANKS, run_all, tmp_path_factory.mktemp("padding"), timeout_seconds=120)


SUMS = [float(samples(count).sum()) for count in SAMPLES]
MEANS = [float(samples(count).mean()) for count in SAMPLES]
OF_CALLBACK = {"callback, before": sum(SUMS), "callback, after": sum(SUMS)}
IN_ATTRIBUTES = dict.fromkeys(("dict", "list in dict", "tuple", "object", "late", "numbers"), SUMS[0])
LOGGED = {
    f"{name}/dataloader_idx_{loader}": mean
    for name in ("each", "plainly", "of the module", "of the callback")
    for loader, mean in enumerate(MEANS)
}
OF_EVALUATION = IN_ATTRIBUTES | LOGGED | OF_CALLBACK | {"retrieval": 1.0}


@pytest.mark.parametrize("run", ["ddp", "fsdp", "test"])
def test_an_evaluation_counts_each_sample_once(runs: list[dict[str, list[dict[str, float]]]], run: str) -> None:
    for rank in range(RANKS):
        assert len(runs[rank][run]) == (1 if run == "test" else EPOCHS)
        for evaluation in runs[rank][run]:
            assert evaluation == pytest.approx(OF_EVALUATION), f"rank {rank}"


def test_a_prediction_counts_each_sample_once(runs: list[dict[str, list[dict[str, float]]]]) -> None:
    for rank in range(RANKS):
        assert runs[rank]["predict"] == [pytest.approx(OF_CALLBACK)]
