"""What a sweep came to, of runs that are there already."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.config.compose import compose
from shardwise.plan import Host, Plan, make_plan
from shardwise.run_dir.sweep import report_sweep, swept


def plan(folder: Path, number: int, mode: str) -> Plan:
    words = [f"runs_dir={folder}", f"name=tries-{number}", "micro_batch_size=2", "global_batch_size=2",
             "checkpoint.monitor=validation/accuracy", f"checkpoint.mode={mode}"]  # fmt: skip
    return make_plan(compose(words).jobs[0].config, Host(cuda_devices=0))


@pytest.mark.parametrize(("mode", "order"), [("max", ["1", "0", "2"]), ("min", ["0", "1", "2"])])
def test_the_best_run_comes_first_and_a_failed_one_last(tmp_path: Path, mode: str, order: list[str]) -> None:
    plans = [plan(tmp_path, number, mode) for number in range(3)]
    for made, score in zip(plans, (0.5, 0.75, 0.9), strict=True):
        folder = Path(made.run_dir)
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps({"best": {"validation/accuracy": score}, "train/loss": 1.0}))
        (folder / "metrics.csv").write_text("step,train/loss,validation/accuracy\n1,2.0,\n2,,0.25\n3,1.0,\n4,,0.5\n")
    jobs = [("model=tiny", f"optimizer.lr={lr}", "++module.a=b") for lr in ("0.1", "0.2", "0.3")]
    lines = report_sweep(jobs, plans, [0, 0, 3]).splitlines()
    assert [line.rpartition("-")[2] for line in lines[2:5]] == order
    assert lines[2].startswith(f"optimizer.lr=0.{int(order[0]) + 1}  validation/accuracy 0.")
    assert lines[4].startswith("optimizer.lr=0.3  failed, exit code 3")
    assert lines[5] == f"curves: {tmp_path / 'tries.png'}" and (tmp_path / "tries.png").stat().st_size > 1000


def test_only_what_differs_is_named() -> None:
    assert swept([("a=1", "b=2", "+c=3"), ("a=1", "b=3", "+c=3")]) == [{"b": "2"}, {"b": "3"}]
