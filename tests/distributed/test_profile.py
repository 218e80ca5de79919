"""A profile of some steps: it changes no number of the run, and says what each phase of a step took."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.callbacks.guard import RollBack
from shardwise.metrics.memory_profile import summarize_memory
from shardwise.run_dir.events import read_events
from shardwise.run_dir.files import profile_folder, profile_trace
from shardwise.run_dir.profile_request import Request, write_request
from shardwise_tools import main
from shardwise_tools.traces import ProfileSummary
from tests.harness.cells import cell_plan, fit
from tests.harness.commands import OWN, RECIPE, Running, check, make_home, run
from tests.harness.processes import spawn

WORDS = ["micro_batch_size=2", "global_batch_size=8", "max_steps=8", "deterministic=true"]
PROFILED = ["profile.start=4", "profile.steps=2", "profile.ranks=all", "validate_every_n_steps=4",
            "checkpoint.save_every_n_steps=5", "max_validation_batches=2"]  # fmt: skip


def annotations(trace: Path) -> list[tuple[str, float, float]]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sorted(
        ((e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "user_annotation"),
        key=lambda event: event[1],
    )


def unread() -> Any:
    """The traces are written and not read: to read one takes a process of its own some seconds."""
    return patch("shardwise.callbacks.profile.ProfileReading", **{"return_value.wait.return_value": ""})


def both(folder: Path) -> dict[str, Any]:
    """Each strategy with a profile and without: losses, whether the weights are the same, what the traces have."""
    found = {}
    for strategy in ("ddp", "fsdp", "zero2"):
        words = [*WORDS, *PROFILED[3:], f"strategy={strategy}"]
        plain = fit(cell_plan(folder / f"{strategy}-plain", 2, *words))
        with redirect_stdout(StringIO()) as said, nullcontext() if strategy == "fsdp" else unread():
            run = fit(cell_plan(folder / strategy, 2, *words, *PROFILED[:3]))
        found[strategy] = {
            "losses": (plain["losses"], run["losses"]),
            "weights": all(torch.equal(value, run["final"][name]) for name, value in plain["final"].items()),
            "said": said.getvalue(),
        }
    return found


def test_a_profile_changes_no_bit_and_names_every_phase(tmp_path: Path) -> None:
    rank_0, _ = spawn(2, both, tmp_path)
    for strategy, found in rank_0.items():
        assert found["weights"] and found["losses"][0] == found["losses"][1] and len(found["losses"][0]) == 8
        folder = profile_folder(tmp_path / strategy, 4)
        for rank in range(2):
            check_annotations(annotations(profile_trace(folder, rank)))
        assert not list(folder.glob("*.partial"))
        with (tmp_path / strategy / "metrics.csv").open() as file:
            rows = {int(row["step"]): row for row in csv.DictReader(file) if row["train/loss"]}
        unmeasured = {step for step, row in rows.items() if not row["train/step_seconds"]}
        assert unmeasured == {step for step, row in rows.items() if not row["train/data_wait"]} == {3, 4, 5, 6}


def check_annotations(events: list[tuple[str, float, float]]) -> None:
    """Two steps of two micro-batches; in the first validation comes, and after the second a checkpoint is saved."""
    ours = [event for event in events if event[0].startswith(("ProfilerStep", "shardwise::"))]
    assert Counter(name for name, _, _ in ours) == {
        "ProfilerStep#4": 1, "ProfilerStep#5": 1, "shardwise::data": 5, "shardwise::forward": 4,
        "shardwise::backward": 4, "shardwise::optimizer": 2, "shardwise::save": 1, "shardwise::validation": 1,
    }  # fmt: skip
    steps = [event for event in ours if event[0].startswith("ProfilerStep")]
    phases = [event for event in ours if event[0].startswith("shardwise")]
    for name, begin, end in phases:
        assert any(first <= begin and end <= last for _, first, last in steps), name
    for (name, _, end), (other, begin, _) in itertools.pairwise(phases):
        assert end <= begin, f"{name} is not over when {other} begins"


class RollsBack(Callback):
    """Rolls the run back once, in the middle of a window."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 5:
            raise RollBack(0)


@contextmanager
def as_on_a_gpu() -> Iterator[list[Any]]:
    """What the CPU has no allocator for: its history is empty. Yields the tensors that the run has pointed out."""
    known: list[Any] = []
    empty = {"segments": [], "device_traces": []}
    here = "shardwise.metrics.profiler"
    with (
        patch(f"{here}.record_memory_history"), patch(f"{here}.end_memory_history"),
        patch(f"{here}.memory_snapshot", return_value=empty),
        patch(f"{here}.summarize_memory", lambda *_, **more: known.append([more["known"]]) or summarize_memory(empty)),
    ):  # fmt: skip
        yield known


def edges(folder: Path) -> dict[str, Any]:
    """What a run says whose window is at an edge."""
    said: dict[str, Any] = {}

    def run(name: str, *words: str, callback: Callback | None = None, memory: bool = False) -> None:
        plan = cell_plan(folder / name, 1, "micro_batch_size=4", "global_batch_size=8", *words)
        plan = dataclasses.replace(plan, profile=dataclasses.replace(plan.profile, memory=memory))
        with redirect_stdout(StringIO()) as out, nullcontext() if name == "first" else unread():
            fit(plan, *([] if callback is None else [callback]))
        said[name] = out.getvalue()

    run("first", "max_steps=2", "profile.start=1", "profile.steps=2", "profile.stacks=true")
    with as_on_a_gpu() as known:
        run("memory", "max_steps=2", "profile.start=2", memory=True)
        run("memory-zero3", "max_steps=2", "profile.start=2", "strategy=zero3", memory=True)
    said["known"], said["known of zero3"] = (Counter(one.category for one in tensors) for [tensors] in known)
    run("parts", "max_steps=3")
    saved = f"resume={folder}/parts/checkpoints/step-00000003.ckpt"
    run("parts", "max_steps=5", saved, "profile.start=2")
    epochs = ["max_steps=null", "max_epochs=2", "schedule=none", "validate_every_n_steps=null"]
    run("epochs", *epochs, "profile.start=7")  # 50 samples are six steps
    run("short", *epochs, "profile.start=12", "profile.steps=5")
    run("never", *epochs, "profile.start=40")
    with pytest.raises(RollBack):
        run("back", "max_steps=8", "profile.start=4", "profile.steps=3", callback=RollsBack())
    run("back", "max_steps=8", "profile.start=4")
    return said


def test_a_window_at_an_edge_of_the_run(tmp_path: Path) -> None:
    [said] = spawn(1, edges, tmp_path)

    def steps(name: str, first: int) -> list[int]:
        names = [name for name, _, _ in annotations(profile_trace(profile_folder(tmp_path / name, first), 0))]
        return [int(name.partition("#")[2]) for name in names if name.startswith("ProfilerStep")]

    assert steps("first", 1) == [1, 2] and "steps 1 to 2 of rank 0" in said["first"]
    summary = ProfileSummary.from_json((profile_folder(tmp_path / "first", 1) / "summary.json").read_text())
    for step in summary.steps:
        parts = step.compute_ms + step.exposed_communication_ms + step.copies_alone_ms + step.idle_ms
        assert parts == pytest.approx(step.span_ms, rel=0.01)
    sums = json.loads((tmp_path / "first/summary.json").read_text())
    assert "a profile disturbed every step" in said["first"] and "% of the time" not in said["first"]
    assert sums["step_seconds"] is sums["samples_per_second"] is sums["data_wait"] is sums["goodput"] is None
    assert sums["steps_this_process"] == 2 and sums["measured_steps_this_process"] == 0 < sums["tokens_this_process"]
    assert (
        " s in 10 of the 12 steps of this process" in said["short"]
        and "a profile disturbed the other 2" in said["short"]
    )
    known = said["known"]
    assert 0 < known["gradients"] <= known["parameters"] and known["optimizer"] == 3 * known["gradients"]
    of_zero3 = said["known of zero3"]
    assert of_zero3["gradients"] == 2  # flat ones: the rank's part, and the bucket in which they are reduced
    assert of_zero3["optimizer"] >= 3 * 2  # of two groups: the masters and their moments
    assert (profile_folder(tmp_path / "memory", 2) / "memory-rank-0.png").exists()
    assert "profile: none is taken: profile.start=2, and the run goes on after step 3" in said["parts"]
    assert steps("epochs", 7) == [7] and steps("short", 12) == [12]
    names = [name for name, _, _ in annotations(profile_trace(profile_folder(tmp_path / "epochs", 7), 0))]
    assert "shardwise::validation" not in names  # it comes between the epochs, before the window
    assert "profile: none is taken: the run has ended with step 12, before step 40" in said["never"]
    assert steps("back", 4) == [4]
    [event] = [event for event in read_events(tmp_path / "first") if event.kind == "profile"]
    assert (event.data["first"], event.data["last"]) == (1, 2)


def test_a_run_that_is_under_way_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = make_home(tmp_path)
    runs = home / "runs"
    words = [*RECIPE, "max_steps=100000", "devices=2", "name=asked", "max_validation_batches=0", "checkpoint=none"]
    with Running(home, "asked", *words) as running:
        running.wait_for("step 3/")
        assert (
            main(["profile", str(runs / "asked"), "--steps", "2", "--stacks", "--ranks=all", "wait_seconds=400"]) == 0
        )
        said = capsys.readouterr().out
        [folder] = (runs / "asked/profile").iterdir()
        assert '"cat": "python_function"' in gzip.decompress((folder / "rank-0.json.gz").read_bytes()).decode()
        assert "of rank 0 (CPU" in said and said.count("\nthe run ") + said.startswith("the run ") >= 1
        assert {path.name for path in folder.iterdir()} == {
            "rank-0.json.gz", "rank-1.json.gz", "ranks.json", "summary.json", "profile.txt", "profile.png",
        }  # fmt: skip
        write_request(runs / "asked", Request())
        assert not (runs / "asked/profile-request.json.partial").exists()
        assert main(["profile", str(runs / "asked")]) == 2
        assert "somebody has asked for a profile" in capsys.readouterr().err
    for name, message in (
        ("asked", "is not under way: it was stopped, or has died"),
        ("none", "is the folder of no run"),
    ):
        assert main(["profile", str(runs / name)]) == 2
        assert message in capsys.readouterr().err


FAILS = """
from mine import Data, Module as Mine

class Module(Mine):
    def training_step(self, batch, batch_idx):
        if self.global_step == 2:
            raise ValueError("broken by hand")
        return super().training_step(batch, batch_idx)
"""


def test_a_module_that_raises_in_the_window_ends_the_run_as_without_it(tmp_path: Path) -> None:
    home = make_home(tmp_path)
    (home / "fails.py").write_text(FAILS)
    words = [*OWN, "module._target_=fails.Module", "devices=1", "name=fails", "profile.start=2", "profile.steps=2"]
    done = check(run(home, *words, anew=True), 1)  # to finalize the interpreter while torch records is a crash
    assert "USDT" not in done.stderr + done.stdout
    assert "error: ValueError: broken by hand\n  in training_step, fails.py line 7" in done.stderr
    assert profile_folder(home / "runs/fails", 2).is_dir()
