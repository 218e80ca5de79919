"""What a sweep came to, of runs that are there already."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.config.compose import compose
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.run_dir.events import append_event
from shardwise.run_dir.sweep import report_sweep, swept
from shardwise.start.plans import make_run_plans
from shardwise.start.run import report_array


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


@pytest.mark.parametrize("name", [None, "own"])
def test_the_member_of_an_array_that_ends_prints_the_table_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str | None
) -> None:
    """The last one has them all; the others say which have no end yet."""
    words = ["-m", f"runs_dir={tmp_path}", "seed=5,6,7", *([f"name={name}"] if name else [])]
    jobs = compose(words).jobs
    for key, value in {"JOB_ID": "42", "PROCID": "0", "ARRAY_JOB_ID": "40", "ARRAY_TASK_ID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{key}", value)
    [own], [member] = make_run_plans(jobs, Host(0, run_id="slurm-40_1"))
    ids = [f"own-{number}" if name else f"slurm-40_{number}" for number in range(3)]
    assert own is jobs[1] and member.run_id == ids[1]
    for number, run_id in enumerate(ids):
        folder = tmp_path / run_id
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps({"validation/loss": 3.0 - number}))
        (folder / "metrics.csv").write_text("step,train/loss\n1,2.0\n2,1.5\n")
        append_event(folder, "start", 0, "")
    append_event(member.run_dir, "end", None, "", exit_code=5)  # it was requeued
    append_event(member.run_dir, "start", 1, "")
    append_event(tmp_path / ids[0], "end", None, "", exit_code=0)
    report_array(jobs, member, 0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "the sweep so far, best first:" and lines[-1] == f"curves: {tmp_path / ids[0][:-2]}.png"
    assert [line.split()[0] for line in lines[2:5]] == ["seed=6", "seed=5", "seed=7"]
    assert lines[4].startswith("seed=7  no end is recorded ")
    append_event(tmp_path / ids[2], "end", None, "", exit_code=3)
    report_array(jobs, member, 0)
    said = capsys.readouterr().out
    assert "the sweep, best first:" in said and "seed=7  failed, exit code 3" in said
    assert [path.name for path in tmp_path.glob("*.png")] == [f"{ids[0][:-2]}.png"]
    report_array(jobs, member, 5)  # it goes on
    assert capsys.readouterr().out == ""


def test_only_what_differs_is_named() -> None:
    assert swept([("a=1", "b=2", "+c=3"), ("a=1", "b=3", "+c=3")]) == [{"b": "2"}, {"b": "3"}]


def test_runs_without_a_monitor_are_ranked_by_the_loss_of_their_validation(tmp_path: Path) -> None:
    plans = [replace(made, checkpoint=replace(made.checkpoint, monitor=None))
             for made in (plan(tmp_path, number, "min") for number in range(2))]  # fmt: skip
    for made, score in zip(plans, (0.5, 0.25), strict=True):
        Path(made.run_dir).mkdir()
        (Path(made.run_dir) / "summary.json").write_text(json.dumps({"val/loss": score, "train/loss": 1.0 - score}))
    lines = report_sweep([("seed=1",), ("seed=2",)], plans, [0, 0]).splitlines()
    assert lines[2].startswith("seed=2  val/loss 0.25")
