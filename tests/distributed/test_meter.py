"""What a run says about its speed: exact over the ranks, waiting told from work, and goodput over restarts."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from shardwise.config.compose import compose
from shardwise.metrics.meter import SPENT, Meter, Sums, process_start
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.run_dir.files import read_rows
from shardwise.step.record import Readback, StepRecord, Tick
from shardwise.trainer import build_module
from tests.harness.cells import cell_plan, fit, masked_tokens
from tests.harness.modules import samples
from tests.harness.processes import spawn

STRATEGIES = ["ddp", "fsdp", "zero1", "zero3"]
WAIT = 0.15


class Slow(Dataset[Any]):
    """Sample 0 of every eight, which is rank 1's, takes its time."""

    def __init__(self) -> None:
        self.rows = samples("pairs", 64, 0)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if index % 8 == 4:
            time.sleep(WAIT)
        return self.rows[index]


class SlowData(LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Slow(), batch_size=self.batch_size, shuffle=False)


def rows_of(run_dir: str | Path) -> list[dict[str, str]]:
    with (Path(run_dir) / "metrics.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row.get("train/samples")]


def slow_plan(run_dir: Path) -> Plan:
    run_dir.mkdir(parents=True, exist_ok=True)
    argv = [
        "recipe=custom", "module._target_=tests.harness.modules.Bare",
        "data._target_=tests.distributed.test_meter.SlowData", "+data.batch_size=${micro_batch_size}",
        f"runs_dir={run_dir.parent}", f"name={run_dir.name}", "accelerator=cpu", "devices=2", "micro_batch_size=4",
        "global_batch_size=8", "max_steps=6", "checkpoint=none", "validate_every_n_steps=1000", "log_every_n_steps=3",
    ]  # fmt: skip
    return make_plan(compose(argv).jobs[0].config, Host(cuda_devices=0))


def run_all(folder: Path) -> dict[str, Any]:
    words = ["micro_batch_size=2", "global_batch_size=8", "max_steps=4", "schedule=none", "log_every_n_steps=2"]
    for strategy in STRATEGIES:
        fit(cell_plan(folder / strategy, 2, f"strategy={strategy}", *words))
    fit(slow_plan(folder / "slow"))
    again = ["checkpoint.save_every_n_steps=2", "checkpoint.save_at_end=false"]
    fit(cell_plan(folder / "restarted", 2, *words, *again, "max_steps=3"))
    fit(cell_plan(folder / "restarted", 2, *words, f"resume={folder}/restarted/checkpoints/step-00000002.ckpt"))
    return {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meter")
    spawn(2, run_all, folder)
    return folder


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tokens_are_those_of_all_ranks(folder: Path, strategy: str) -> None:
    valid = [int((row["targets"] != -100).sum()) for row in masked_tokens(50)]
    parameters = sum(p.numel() for p in build_module(cell_plan(folder / "built", 1)).parameters())
    summary = json.loads((folder / strategy / "summary.json").read_text())
    # MaskedTokens are read in order: 8 sequences a step
    assert summary["tokens_this_process"] == sum(valid[:32])
    assert summary["parameters"] == summary["trained_parameters"] == parameters  # whole, not this rank's part
    first, second, last = rows_of(folder / strategy)
    assert [int(row["step"]) for row in (first, second, last)] == [1, 2, 4]
    for row, steps, tokens in ((first, 1, valid[:8]), (second, 1, valid[8:16]), (last, 2, valid[16:32])):
        seconds = float(row["train/step_seconds"]) * steps
        assert float(row["train/tokens_per_second"]) * seconds == pytest.approx(sum(tokens))
        assert float(row["train/samples_per_second"]) * seconds == pytest.approx(8 * steps)
    assert float(last[SPENT]) > float(second[SPENT]) > 0
    assert 0 < float(last["train/goodput"]) < 1


def test_the_rank_that_waits_longest_is_told(folder: Path) -> None:
    """Rank 1 waits for its data, rank 0 for rank 1."""
    rows = rows_of(folder / "slow")
    waited = float(rows[-1]["train/data_wait"]) * float(rows[-1]["train/step_seconds"])
    assert waited >= WAIT * 0.99
    ranks = [float(row["train/data_wait"]) for row in read_rows(folder / "slow" / "ranks.csv")][-2:]
    assert ranks[1] == pytest.approx(float(rows[-1]["train/data_wait"]), rel=1e-5) and ranks[0] < ranks[1]
    summary = json.loads((folder / "slow" / "summary.json").read_text())
    assert summary["data_wait"] < 0.5, "rank 0 itself has its batches at once"


def test_goodput_counts_what_survives_a_restart(folder: Path) -> None:
    starts = json.loads((folder / "restarted" / "starts.json").read_text())
    assert len(starts) == 2 and starts[0] == pytest.approx(starts[1], abs=1.0), "the start of the process: one, here"
    assert abs(process_start() - time.time()) > 1.0, "imports count"
    rows = {int(row["step"]): float(row[SPENT]) for row in rows_of(folder / "restarted")}
    assert sorted(rows) == [1, 2, 4] and 0 < rows[2] < rows[4], "step 3 was made twice and counts once"


def step_of(seconds: float, waiting: float, fetching: float) -> StepRecord:
    ticks = [Tick(torch.device("cpu")) for _ in range(3)]
    for tick, at in zip(ticks, (0.0, waiting, seconds), strict=True):
        tick.seconds = at
    values = Readback(torch.zeros(4))
    values.end = ticks[2]
    return StepRecord(
        number=1, start=0, learning_rate=0.0, loss_scale=None, step_skipped=False, values=values, ranks=1,
        of_rank=(10, 10**12, 0), losses=[], gradients=[], begin=ticks[0], arrived=ticks[1], fetching_seconds=fetching,
    )  # fmt: skip


class OneGpu:
    """Of a Plan what the meter reads."""

    peak_tflops: float | None = 100.0
    run_dir = "."

    class topology:
        world_size = 4


def test_mfu_waiting_and_the_first_step() -> None:
    meter = Meter(OneGpu())  # type: ignore[arg-type]
    meter.add(step_of(30.0, 1.0, 0.5), 10, 10**12)
    assert meter.steady == Sums(1, 30.0, 0.5, 10, 10**12)  # the host fetched for 0.5 s: the rest was not the data's
    for _ in range(2):
        meter.add(step_of(2.0, 0.25, 1.0), 40.0, 8e12)
    assert meter.steady == Sums(2, 4.0, 0.5, 80.0, 16e12)
    assert meter.mfu(meter.steady) == pytest.approx(16e12 / (4.0 * 4 * 100e12))
    assert meter.training_seconds == pytest.approx(4.0 + 2.0), "the first step compiled: it counts as the others"
    assert meter.take_interval() == Sums(3, 34.0, 1.0, 90.0, 17e12) and meter.take_interval() == Sums()
    meter.leave_out(range(1, 2))
    meter.add(step_of(2.0, 0.25, 1.0), 40.0, 8e12)
    assert meter.take_interval() == Sums() and meter.weight == 130.0, (
        "a profiled step has no speed, and its tokens count"
    )
    OneGpu.peak_tflops = None
    assert meter.mfu(meter.steady) is None
