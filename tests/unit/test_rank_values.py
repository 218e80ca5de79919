"""Numbers of every rank: their columns, and the file that has them all."""

import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardwise.metrics.meter import HostTiming, RanksCsv, RankValues, columns
from shardwise.metrics.verdicts import DEVICE_MEMORY, RETRIES
from shardwise.run_dir.events import append_event, read_events
from shardwise.run_dir.files import read_rows
from shardwise.step.record import HostTimes
from tests.harness.cells import cell_plan

NAN = float("nan")


def test_a_spread_names_the_ranks_of_the_smallest_and_the_largest() -> None:
    assert columns("gpu/power", [3.0, NAN, 1.0, 5.0], "spread") == {
        "gpu/power": 3.0, "gpu/power_min": 1.0, "gpu/power_min_rank": 2.0, "gpu/power_max": 5.0,
        "gpu/power_max_rank": 3.0,
    }  # fmt: skip
    assert columns("gpu/power", [3.0], "spread") == {"gpu/power": 3.0}
    assert columns("wait", [3.0, NAN, 7.0], "largest") == {"wait": 7.0}
    assert columns("wait", [NAN, NAN], "largest") == columns("wait", [1.0, 2.0], "not") == {}


def written(path: Path) -> list[tuple[int, int, str]]:
    return [(int(row["step"]), int(row["rank"]), row["a"]) for row in read_rows(path / "ranks.csv")]


def test_every_rank_has_a_row_and_a_resumed_run_writes_later_ones_again(tmp_path: Path) -> None:
    file = RanksCsv(tmp_path)
    file.append(1, {"a": [1.0, NAN]})
    file.append(2, {"a": [2.0, 3.0]})
    assert written(tmp_path) == [(1, 0, "1"), (1, 1, ""), (2, 0, "2"), (2, 1, "3")]
    with (tmp_path / "ranks.csv").open("a") as cut:
        cut.write("3,1700")  # a kill
    again = RanksCsv(tmp_path)
    again.rewind(1)
    again.append(2, {"b": [7.0, 8.0], "a": [4.0, 5.0]})
    assert written(tmp_path) == [(1, 0, "1"), (1, 1, ""), (2, 0, "4"), (2, 1, "5")]
    assert [row["b"] for row in read_rows(tmp_path / "ranks.csv")] == ["", "", "7", "8"]
    RanksCsv(tmp_path).rewind(0)
    assert not (tmp_path / "ranks.csv").exists()


def test_a_row_reads_the_statistics_of_memory_once(tmp_path: Path) -> None:
    counts = {"allocated_bytes": {"all": {"current": 2**30, "peak": 2**31}}, "reserved_bytes": {"all": {"peak": 2**32}}}
    values = RankValues()
    timing = HostTiming("cuda", values)
    timing.begin(HostTimes(cell_plan(tmp_path, 1)), torch.device("cuda", 0))
    alone: Any = SimpleNamespace(group=lambda name: SimpleNamespace(size=lambda: 1))
    counted: Any = counts | {"num_alloc_retries": 7}
    with patch.object(torch.cuda, "memory_stats_as_nested_dict", return_value=counted) as read:
        found = values.gather(alone, torch.device("cpu")).read()
    timing.end()
    assert read.call_count == 1
    assert found[DEVICE_MEMORY] == [1.0] and found[RETRIES] == [7.0]
    assert values.row(found) == {"train/memory_allocated_gib": 2.0, "train/memory_reserved_gib": 4.0}


def test_a_long_file_keeps_every_second_step(tmp_path: Path) -> None:
    file = RanksCsv(tmp_path, limit=2000)
    for step in range(1, 400):
        file.append(step, {"a": [float(step), -float(step)]})
    steps = [step for step, rank, _ in written(tmp_path) if rank == 0]
    assert (tmp_path / "ranks.csv").stat().st_size < 2500
    gaps = {later - earlier for earlier, later in pairwise(steps)}
    assert len(gaps) <= 2 and steps[0] == 1 and steps[-1] > 350, "they are spread evenly over the whole run"


def test_events_survive_a_line_that_was_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append_event(tmp_path, "save", 3, "it is saved", path="x")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": 1.0, "kind": "sa\n[1]')
    append_event(tmp_path, "end", None, "the run ended", exit_code=0)
    assert [(e.kind, e.step, e.data) for e in read_events(tmp_path)] == [
        ("save", 3, {"path": "x"}), ("end", None, {"exit_code": 0}),
    ]  # fmt: skip
    assert read_events(tmp_path / "none") == []
    append_event(tmp_path / "none", "end", None, "the run ended")
    assert "No such file or directory" in capsys.readouterr().err
    assert not math.isnan(read_events(tmp_path)[0].time)
