"""`shardwise bench-data`: what it prints and draws, which setting it calls best, and what it refuses."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from shardwise.config.compose import compose
from shardwise.data.tokens import write_token_shards
from shardwise.errors import ConfigError
from shardwise.plan import Host
from shardwise.plan.resolve import make_plan
from shardwise_tools import main
from shardwise_tools.bench_data import Appetite, Row, appetite_of, best_row, table, time_batches, verdict
from tests.harness.commands import environment
from tests.harness.patience import run_patiently

ROOT = Path(__file__).resolve().parents[2]
H100 = Appetite(samples_per_second=100.0, device="H100", devices=8, source="at 50% of its peak")


def row(workers: int, samples: float, tokens: float | None = None) -> Row:
    return Row(workers, 1.25, samples / 4, samples, tokens)


def test_a_table_has_a_line_for_each_number_of_workers() -> None:
    lines = table([row(0, 1000.0, 8000.0), row(4, 2.5, 20.0)], "tokens").splitlines()
    assert [line.split() for line in lines] == [
        ["workers", "samples/s", "tokens/s", "batches/s", "start-up", "s"],
        ["0", "1,000", "8,000", "250", "1.2", "█" * 30],
        ["4", "2.5", "20", "0.625", "1.2", "█"],
    ]
    assert "tokens" not in table([row(0, 10.0)], "")


@pytest.mark.parametrize(
    ("rates", "appetite", "best"),
    [
        ({0: 100, 1: 90, 4: 300, 8: 305}, None, 4),  # the fastest, or with fewer workers about as fast
        ({0: 100, 1: 90, 4: 300, 8: 600}, H100, 4),  # as fast as one device needs, with a reserve
        ({0: 120, 1: 110, 4: 140, 8: 160}, H100, 8),
        ({0: 3000, 1: 1000}, H100, 0),  # the rank itself is quick enough
        ({0: 400, 1: 300}, H100, 1),  # it would spend a fifth of its time on reading
    ],
)
def test_the_best_setting_is_the_least_that_is_enough(
    rates: dict[int, float], appetite: Appetite | None, best: int
) -> None:
    assert best_row([row(workers, rate) for workers, rate in rates.items()], appetite, 1).workers == best


def test_the_verdict_says_how_many_devices_are_fed() -> None:
    fed = verdict(row(2, 4000.0), H100, 8)
    assert fed == (
        "with 2 workers the data give 4,000 samples/s here, and 8 × H100 would eat 800 (at 50% of its peak): the data "
        "are 5.0 times as fast and can feed 40 of them, so the model does not wait"
    )
    assert "can feed 6 of them, so the model would wait for 25% of the time" in verdict(row(2, 600.0), H100, 8)
    assert "cannot feed one of them, so the model would wait for 93.8% of the time" in verdict(row(2, 50.0), H100, 8)
    one = verdict(row(0, 900.0), H100, 1)
    assert "without workers reading takes 10.0% of each rank's time. 1 loader read here; devices=8 reads as" in one
    assert "give cluster=dgx_h100" in verdict(row(2, 4.0), None, 1)


def test_at_least_one_batch_is_timed_also_over_the_end_of_an_epoch() -> None:
    number, seconds = time_batches([1, 2], 1e-9, skip=5)
    assert number == 1 and seconds > 0
    assert time_batches([1], 1e-3, skip=1)[0] > 1


def test_the_data_of_two_ranks_are_read(tmp_path: Path) -> None:
    tokens = np.arange(2000, dtype=np.uint8) % 100
    write_token_shards(tmp_path / "tokens", {"train": [tokens], "validation": [tokens]}, vocab_size=100)
    words = [
        "data=token_shards", "data.directory=tokens", "data.sequence_length=16", "micro_batch_size=2", "devices=2",
        "global_batch_size=8", "workers=1,0", "seconds=0.1", "precision=bf16", "cluster=dgx_h100", "accelerator=cpu",
    ]  # fmt: skip
    done = run_patiently(
        [sys.executable, "-m", "shardwise", "bench-data", *words],
        120,
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(ROOT / "src")),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    begin, head, none, one, best, said, picture = done.stdout.splitlines()
    assert begin.startswith("2 loaders on ") and "tokens/s" in head and "best: data.num_workers=" in best
    assert (none.split()[0], one.split()[0]) == ("0", "1")
    assert "8 × H100 would eat" in said and "at 50% of the peak of 989.4 TFLOP/s in bf16" in said
    drawn = Path(picture.removeprefix("picture: "))
    assert (tmp_path / drawn).stat().st_size > 1000
    record = json.loads((tmp_path / drawn).with_suffix(".json").read_text())
    assert [found["workers"] for found in record["rows"]] == [0, 1]
    assert all(
        found["weights_per_second"] == pytest.approx(16 * found["samples_per_second"]) for found in record["rows"]
    )


def test_a_run_says_what_a_device_has_consumed(tmp_path: Path) -> None:
    config = compose(["accelerator=cpu", "name=run", "devices=2"]).jobs[0].config
    (tmp_path / "plan.json").write_text(make_plan(config, Host(cuda_devices=0)).to_json())
    (tmp_path / "summary.json").write_text('{"samples_per_second": 80.0}')
    found = appetite_of(tmp_path)
    assert (found.samples_per_second, found.devices) == (40.0, 2)
    (tmp_path / "summary.json").write_text('{"samples_per_second": 0.0}')
    with pytest.raises(ConfigError, match="has measured 0 samples/s: name a run that has trained some steps"):
        appetite_of(tmp_path)


CUSTOM = "recipe=custom module._target_=tests.configs.foreign.Own"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("workers=0,-1", "workers=0,-1: must be numbers of at least 0, e.g. workers=0,1,2,4"),
        ("workers=two", "workers=two: must be numbers"),
        ("workers=1 workers=2", "workers=2: workers=1 is given already; give it once"),
        ("seconds=0", "seconds=0: must be above 0"),
        ("seconds=long", "seconds=long: must be a number"),
        ("mfu=2", "mfu=2: must be above 0 and at most 1"),
        ("run=nowhere", "run=nowhere: its summary.json does not say how fast it was"),
        ("-m micro_batch_size=1,2", "-m makes 2: leave it out"),
        ("stage=validate resume=auto name=x", "stage=validate: bench-data reads the data of training"),
        ("data.directry=x", "data.directry=x"),
        (f"{CUSTOM}", "give data._target_=package.Data"),
        (f"{CUSTOM} data._target_=tests.configs.foreign.Data", "foreign.Data takes no num_workers"),
        (
            f"{CUSTOM} data._target_=tests.configs.foreign.WithoutLoader",
            "WithoutLoader has no train_dataloader, so there is nothing",
        ),
    ],
)
def test_what_cannot_be_measured(
    line: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(os.getcwd())
    monkeypatch.chdir(tmp_path)
    assert main(["bench-data", *line.split(), "accelerator=cpu"]) == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith("error: ") and said.count("\n") == 1
