"""Faults that are made on purpose in real ranks: each gets its verdict, and a healthy run gets none."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardwise.config.compose import compose
from shardwise.metrics.verdicts import BUSY, COMPUTE, DATA_WAIT, SECONDS
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.run_dir.events import read_events
from shardwise.run_dir.files import read_rows
from tests.harness.cells import cell_plan, fit
from tests.harness.faults import Faulty
from tests.harness.processes import spawn
from tests.unit.test_loggers import records

OFTEN = ["strategy=fsdp", "global_batch_size=8", "units=[Linear]", "+module.width=768", "+module.rows=16"]
# Run → its fault, overrides, and the verdict with its rank and cause. Each run lasts for a few observations.
FAULTS: dict[str, tuple[str, list[str], tuple[str, int | None, str]]] = {
    "slow loader": ("data", ["max_steps=30"], ("data-bound", None, "")),
    "slow loader of one rank": ("data_of_one", ["max_steps=30"], ("straggler", 1, "data")),
    "slow host": ("host", ["max_steps=30"], ("straggler", 1, "host")),
    "more work on one rank": ("compute", ["max_steps=26"], ("straggler", 1, "compute")),
    "more work, sharded": ("compute", ["max_steps=26", "strategy=fsdp"], ("straggler", 1, "compute")),
    "reduced in every micro-batch": ("", [*OFTEN, "max_steps=30"], ("communication-bound", None, "")),
    "growing memory": ("leak", ["max_steps=44"], ("leaking memory", 1, "")),
    "garbage": ("garbage", ["max_steps=44"], ("garbage collection", None, "")),
}
HEALTHY = {
    "healthy": ["max_steps=64"],
    "reduced once": [*OFTEN, "strategy.defer_gradient_sync=true", "max_steps=20"],
}
QUICK = ["slow loader of one rank", "healthy"]
TOLD = "slow loader of one rank"  # this run has two trackers
TRACKERS = ["logger=wandb", "logger.mode=offline",
            "loggers.board._target_=lightning.pytorch.loggers.TensorBoardLogger"]  # fmt: skip
SHORT = ["max_steps=40", "micro_batch_size=2", "global_batch_size=8", "schedule=none"]


def plan_of(run_dir: Path, fault: str, words: list[str]) -> Plan:
    run_dir.mkdir(exist_ok=True)
    argv = [
        "recipe=custom", "module._target_=tests.harness.faults.Faulty", f"+module.fault={fault}",
        "data._target_=tests.harness.faults.FaultyData", f"+data.fault={fault}", f"runs_dir={run_dir.parent}",
        f"name={run_dir.name}", "accelerator=cpu", "devices=2", "micro_batch_size=1", "global_batch_size=2",
        "checkpoint=none", "validate_every_n_steps=1000000", "log_every_n_steps=1", "units=[]", *words,
    ]  # fmt: skip
    return make_plan(compose(argv).jobs[0].config, Host(cuda_devices=0))


def run_named(folder: Path, names: list[str]) -> None:
    for name in names:
        fault, words = FAULTS[name][:2] if name in FAULTS else ("", HEALTHY[name])
        run_dir = folder_of(folder, name)
        trackers = [*TRACKERS, f"loggers.board.save_dir={run_dir}/board"] if name == TOLD else []
        fit(plan_of(run_dir, fault, [*words, *trackers]))
        if wandb.run is not None:
            wandb.finish()  # the process goes on with the next run


def folder_of(folder: Path, name: str) -> Path:
    return folder / name.replace(",", "").replace(" ", "-")


def run_collectors(folder: Path) -> dict[str, Any]:
    by_hand = fit(cell_plan(folder / "by-hand", 2, *SHORT, "gc_every_n_steps=2"))
    assert gc.get_freeze_count() == 0 and gc.get_threshold() == (700, 10, 10), "the collector is as it was"
    gc.set_threshold(600, 5, 5)  # as a user's own code may
    own = fit(cell_plan(folder / "own", 2, *SHORT, "gc_every_n_steps=2"))
    assert gc.get_threshold() == (600, 5, 5)
    return {"same": all(torch.equal(by_hand["final"][name], own["final"][name]) for name in own["final"])}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a fault and one without: the quick tier has these."""
    folder = tmp_path_factory.mktemp("verdicts")
    spawn(2, run_named, folder, QUICK)
    return folder


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verdicts")
    spawn(2, run_named, folder, [name for name in [*FAULTS, *HEALTHY] if name not in QUICK])
    return folder


def run_of(name: str, request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue("first" if name in QUICK else "others")
    return folder_of(folder, name)


def verdicts(run_dir: Path) -> list[dict[str, Any]]:
    return [event.data | {"text": event.text} for event in read_events(run_dir) if event.kind == "verdict"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_its_verdict_and_no_other(request: pytest.FixtureRequest, name: str) -> None:
    run_dir = run_of(name, request)
    told = verdicts(run_dir)
    wanted, rank, cause = FAULTS[name][2]
    assert {(one["name"], one["cause"] or "") for one in told} == {(wanted, cause)}, told
    assert rank is None or {one["rank"] for one in told} == {rank}
    if rank is not None:
        assert told[0]["host"] and f"rank {rank} (host {told[0]['host']})" in told[0]["text"]
    summary = json.loads((run_dir / "summary.json").read_text())["verdicts"]
    assert [one["name"] for one in summary] == [wanted] and summary[0]["remedy"] and summary[0]["numbers"]
    assert "step/" not in (run_dir / "metrics.csv").read_text().splitlines()[0], "these columns are in ranks.csv alone"
    assert {DATA_WAIT, SECONDS, BUSY, COMPUTE} <= read_rows(run_dir / "ranks.csv")[0].keys(), "what watch reads"


def test_a_verdict_is_in_tensorboard_and_in_wandb_without_a_network(first: Path) -> None:
    run_dir = folder_of(first, TOLD)
    told = verdicts(run_dir)
    board = EventAccumulator(next(str(path.parent) for path in run_dir.glob("board/**/events.out.tfevents.*")))
    board.Reload()
    tag = f"verdict/{told[0]['name']}/text_summary"
    assert [(event.step, event.tensor_proto.string_val[0].decode()) for event in board.Tensors(tag)] == [
        (event.step, event.text) for event in read_events(run_dir) if event.kind == "verdict"
    ]
    (record,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    found = list(records(record))
    alerts = [(one.alert.title, one.alert.text) for one in found if one.HasField("alert")]
    assert alerts == [(f"verdict: {one['name']}", one["text"]) for one in told]
    kept = [item.value_json for one in found if one.HasField("summary") for item in one.summary.update
            if item.key == "verdicts" or list(item.nested_key) == ["verdicts"]]  # fmt: skip
    assert json.loads(kept[-1]) == [told[-1]["text"]]


def test_a_verdict_names_the_override_that_would_help(others: Path) -> None:
    (reduced,) = verdicts(folder_of(others, "reduced in every micro-batch"))
    (garbage,) = verdicts(folder_of(others, "garbage"))
    assert "strategy.defer_gradient_sync=true" in reduced["remedy"] and "fewer objects" in garbage["remedy"]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_none(request: pytest.FixtureRequest, name: str) -> None:
    check_healthy(run_of(name, request))


def check_healthy(run_dir: Path) -> None:
    assert verdicts(run_dir) == []
    assert json.loads((run_dir / "summary.json").read_text())["verdicts"] == []


def test_collecting_by_hand_changes_no_number(tmp_path: Path) -> None:
    assert all(rank["same"] for rank in spawn(2, run_collectors, tmp_path))
    check_healthy(tmp_path / "by-hand")
    check_healthy(tmp_path / "own")


def test_the_module_is_well_without_a_fault() -> None:
    assert Faulty().training_step(torch.ones(1, 4), 0).isfinite()
