"""Streams on two ranks: split by rank or refused, uneven ends, validation, and a run that is resumed; a sampler."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from shardwise.config.compose import compose
from shardwise.errors import ConfigError
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.rank import run_stage
from tests.harness.cells import fit
from tests.harness.modules import Layer
from tests.harness.processes import spawn
from tests.harness.selected import needed

RANKS, STOP, STEPS = 2, 3, 7
LENGTHS = (37, 26)  # of the ranks' streams: 13 micro-batches of two samples, so three steps of four an epoch
RESUMED = {"reads": "ddp", "workers": "fsdp", "state": "zero3", "weighted": "ddp"}


class Rows(IterableDataset[Tensor]):
    """Of this rank, or (`split` is false) of all."""

    def __init__(self, lengths: tuple[int, ...], split: bool = True) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]) * split, int(os.environ["WORLD_SIZE"])
        self.length, self.start, self.at = lengths[self.rank], 0, -1

    def __iter__(self) -> Iterator[Tensor]:
        assert dist.is_initialized()
        for at in range(self.start, self.length):
            self.at = at
            seed = 10_000 * self.rank + at
            yield torch.randn(6, generator=torch.Generator().manual_seed(seed)) + torch.randn(())
        self.start, self.at = 0, -1


class WithState(Rows):
    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"] + 1


class Data(LightningDataModule):
    def __init__(self, kind: str, batch_size: int = 2) -> None:
        super().__init__()
        self.kind, self.batch_size = kind, batch_size

    def train_dataloader(self) -> DataLoader[Tensor]:
        if self.kind == "weighted":
            rows = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
            return DataLoader(rows, batch_size=2, sampler=WeightedRandomSampler([1.0, 5.0] * 30, 60))  # type: ignore[arg-type]
        rows = WithState(LENGTHS) if self.kind == "state" else Rows(LENGTHS, split=self.kind != "same")
        return DataLoader(rows, batch_size=2, num_workers=int(self.kind == "workers"))

    def val_dataloader(self) -> DataLoader[Tensor]:
        if self.kind == "weighted":  # the second rank has a padding batch
            return DataLoader(torch.randn(12, 6), batch_size=4)  # type: ignore[arg-type]
        return DataLoader(Rows((20, 8)), batch_size=4)

    def predict_dataloader(self) -> DataLoader[Tensor]:
        return self.val_dataloader()


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(6), Layer(6))
        self.rows = torchmetrics.SumMetric()
        self.epochs: list[int] = []

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch.sum(1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(nn.functional.dropout(self.layers(batch), 0.2).float(), batch.flip(1))

    def on_train_epoch_end(self) -> None:
        self.epochs.append(self.trainer.global_step)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        torch.topk(self.layers(batch), 3, dim=0)  # needs as many samples
        self.rows.update(torch.tensor(float(len(batch))))
        self.log("validation/rows", self.rows)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def plan_for(folder: Path, kind: str, *words: str) -> Plan:
    folder.mkdir(parents=True, exist_ok=True)
    argv = [
        "recipe=custom", f"module._target_={__name__}.Model", f"data._target_={__name__}.Data", f"data.kind={kind}",
        f"runs_dir={folder.parent}", f"name={folder.name}", "accelerator=cpu", f"devices={RANKS}",
        f"max_steps={STEPS}", "global_batch_size=16", "micro_batch_size=2", "log_every_n_steps=1",
        f"strategy={RESUMED.get(kind, 'ddp')}", f"checkpoint.save_every_n_steps={STOP}", *words,
    ]  # fmt: skip
    return make_plan(compose(argv).jobs[0].config, Host(cuda_devices=0))


def run_all(folder: Path, kinds: set[str] | None) -> dict[str, Any]:
    """In each rank: every kind of data, without a stop and with one at an epoch's end and in its middle."""
    found: dict[str, Any] = {}
    for kind in [kind for kind in RESUMED if kinds is None or kind in kinds]:
        straight = fit(plan_for(folder / f"{kind}-straight", kind))
        found[kind] = [straight]
        for stop in (STOP, STOP + 1):
            run_dir = folder / f"{kind}-{stop}"
            fit(plan_for(run_dir, kind, f"max_steps={stop}"))
            checkpoint = run_dir / "checkpoints" / f"step-{stop:08d}.ckpt"
            found[kind].append(fit(plan_for(run_dir, kind, f"resume={checkpoint}")))
            dist.barrier()
    if kinds is not None:
        return found
    with pytest.raises(ConfigError) as caught:
        fit(plan_for(folder / "same", "same"))
    for kind in ("reads", "weighted"):
        run_stage(plan_for(folder / f"{kind}-predicted", kind, "stage=predict"))
        rows = (folder / f"{kind}-predicted" / "predictions.jsonl").read_text().splitlines()
        found[f"{kind}-predicted"] = [json.loads(row) for row in rows]
    return found | {"same": str(caught.value)}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(RANKS, run_all, tmp_path_factory.mktemp("streams"), needed(request, "kind"))


@pytest.mark.parametrize("kind", RESUMED)
def test_a_resumed_run_reads_on_where_it_was(runs: list[dict[str, Any]], kind: str) -> None:
    for rank in runs:
        straight, *resumed = rank[kind]
        for after in resumed:
            assert after["losses"] == straight["losses"]
            for name, weight in straight["final"].items():
                assert torch.equal(after["final"][name], weight), name
    assert len(set(runs[0][kind][0]["losses"])) == STEPS


def test_every_sample_is_validated_once_though_one_rank_has_fewer(runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        for kind, rows in (("reads", 28), ("weighted", 12)):
            assert rank[kind][0]["validation"]["validation/rows"] == rows


def test_ranks_that_read_the_same_samples_are_told(runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        assert "the training data Rows keeps an order of its own, and ranks 0 and 1 of 2 read the same" in rank["same"]
        assert "split_dataset_by_node" in rank["same"] and "RANK and WORLD_SIZE are in the environment" in rank["same"]


def test_predictions_name_their_samples(runs: list[dict[str, Any]]) -> None:
    rows = runs[0]["weighted-predicted"]
    assert [row["sample"] for row in rows] == list(range(12))
    of_stream = [(row["batch"], row["row"]) for row in runs[0]["reads-predicted"]]
    # Five batches of rank 0, two of rank 1, in turn
    assert of_stream == [(batch, row) for batch in (0, 1, 2, 3, 4, 6, 8) for row in range(4)]
