"""Profiles and debugging words: what the Plan makes of them, how phases are marked, and how a run is asked."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import shlex
import sys
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.callbacks.optional import FindSynchronizing
from shardwise.callbacks.order import build_run_callbacks
from shardwise.config.compose import compose
from shardwise.config.groups import DebugConfig, ProfileConfig
from shardwise.config.paths import ROOT
from shardwise.errors import ConfigError
from shardwise.launch.local import NSYS, check_profiler, launch, make_folder, show_reports, words_before
from shardwise.launch.worker import set_environment
from shardwise.metrics.profiler import Marks, Phases
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.process.signals import SignalRequests, to_leave, to_profile, to_save
from shardwise.run_dir.files import profile_folder
from shardwise.run_dir.profile_request import (
    MOST_STEPS,
    Answer,
    Request,
    read_answer,
    read_request,
    remove_request,
    write_answer,
    write_request,
)
from shardwise.trainer import build_profiler
from shardwise_tools import main
from tests.harness.cells import cell_plan

GPUS = Host(cuda_devices=4, run_id="made-up")


def planned(*words: str, host: Host = GPUS) -> Plan:
    return make_plan(compose(["devices=4", "micro_batch_size=1", *words]).jobs[0].config, host)


def test_the_plan_has_the_profile_and_reads_an_earlier_one() -> None:
    plan = planned("profile.start=20", "profile.ranks=all", "profile.memory=true", "debug.anomaly=true")
    assert plan.profile == ProfileConfig(start=20, ranks="all", memory=True) and plan.debug == DebugConfig(anomaly=True)
    assert plan.profile.has(3) and not ProfileConfig(start=20, ranks=(0, 2)).has(3)
    assert Plan.from_json(plan.to_json()) == plan
    raw = json.loads(planned().to_json())
    del raw["profile"], raw["debug"]
    earlier = Plan.from_json(json.dumps(raw | {"detect_anomaly": True}))
    assert earlier.profile == ProfileConfig() and earlier.debug.anomaly


def test_lightnings_profiler_with_torchs_records_whole_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipeline all of a step's work is in the backward pass of the last micro-batch."""
    monkeypatch.setenv("RANK", "0")
    words = ["profiler=pytorch", "micro_batch_size=1", "global_batch_size=4", "max_steps=6"]
    profiler = build_profiler(cell_plan(tmp_path, 1, *words))
    for _, micro_batch in product(range(6), range(4)):
        with profiler.profile("[Strategy]PipelinedStrategy.training_step"):
            pass
        with profiler.profile("[Strategy]PipelinedStrategy.validation_step"):
            pass
        if micro_batch == 3:
            torch.ones(2, 2) @ torch.ones(2, 2)
    rows = [line.split() for line in profiler.summary().splitlines()]
    calls = {row[0]: int(row[-1]) for row in rows if row and row[0] in ("aten::mm", "ProfilerStep*")}
    assert calls == {"aten::mm": 3, "ProfilerStep*": 12}
    for more, names in (("seed=0", True), ("activation_checkpointing=full", False)):
        assert vars(build_profiler(cell_plan(tmp_path, 1, *words, more)))["_record_module_names"] is names


def test_debugging_words_reach_cuda_and_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("debug.launch_blocking=true", "debug.nccl=info", "runs_dir=/runs")
    assert plan.environment == planned().environment | {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_DEBUG": "INFO"}
    monkeypatch.setattr(os, "environ", {"RANK": "3", "NCCL_DEBUG": "WARN"})
    set_environment(plan)
    assert os.environ["NCCL_DEBUG"] == "WARN" and os.environ["CUDA_LAUNCH_BLOCKING"] == "1"
    assert os.environ["NCCL_DEBUG_FILE"] == "/runs/made-up/logs/nccl-rank-00003.log"


def test_operations_that_wait_are_looked_for_within_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr("shardwise.callbacks.optional.look_for_synchronizing", modes.append)
    callbacks = build_run_callbacks(planned("debug.sync=error")).all
    [finder] = [callback for callback in callbacks if isinstance(callback, FindSynchronizing)]
    nothing: Any = None
    finder.on_train_batch_start(nothing, nothing, nothing, 0)
    finder.on_train_batch_end(nothing, nothing, nothing, nothing, 0)
    assert modes == ["error", "default"]
    assert not any(isinstance(callback, FindSynchronizing) for callback in build_run_callbacks(planned()).all)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("debug.sync=error precision=fp16", "debug.sync=error precision=fp16: each of its steps waits"),
        ("debug.sync=error strategy=zero2", "debug.sync=error strategy=zero2: each of its steps waits"),
        ("profile.start=2 profile.tool=ncu", "would wait for each other for ever: use strategy=ddp devices=1 in place"),
        ("profile.start=2 profile.tool=nsys profile.stacks=true", "only profile.tool=torch has it; leave one out"),
        ("profile.start=2 profile.ranks=[4]", "must be all, or a list such as [0] of ranks from 0 to 3, each once"),
        ("profile.start=2 profile.ranks=[1,1]", "each once"),
    ],
)
def test_what_cannot_be_on_gpus_is_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(*words.split())
    assert message in str(refused.value)


def test_torchrun_has_started_its_ranks_before_nsys_could() -> None:
    host = Host(cuda_devices=4, launcher="torchrun", nodes=1, devices=4, run_id="made-up")
    with pytest.raises(ConfigError, match="torchrun has started the ranks already"):
        planned("profile.start=2", "profile.tool=nsys", host=host)


def test_off_is_what_yaml_reads_as_false() -> None:
    assert compose(["debug.sync=false"]).jobs[0].config.debug.sync == "off"
    assert compose(["debug.nccl=off"]).jobs[0].config.debug.nccl == "off"


def test_a_request_travels_in_the_sum_over_ranks() -> None:
    ranks = [SignalRequests() for _ in range(4096)]
    for rank in ranks:
        rank.save = True
    asked = Request(MOST_STEPS, all_ranks=True, stacks=True)
    ranks[0].ask_for_profile(asked.number)
    total = float(torch.tensor([rank.take_as_number() for rank in ranks], dtype=torch.float64).sum())
    read = Request.of_number(to_profile(total))
    assert (read.steps, read.all_ranks, read.stacks) == (MOST_STEPS, True, True)
    assert to_save(total) and not to_leave(total)
    assert not any(rank.take_as_number() for rank in ranks)
    assert not to_save(float(2**40 * 5)) and to_profile(float(2**20 * 4096 - 1)) == 0


class Recorded(Marks):
    def __init__(self) -> None:
        super().__init__(nvtx=False, silent=True)
        self.said: list[str] = []

    def open(self, name: str) -> None:
        super().open(name)
        self.said.append(f"<{name}")

    def close(self, name: str) -> None:
        super().close(name)
        self.said.append(f"{name}>")


class Steps:
    def __init__(self, said: list[str]) -> None:
        self.said, self.automatic_optimization = said, True

    def training_step(self, value: int) -> int:
        self.said.append("computes")
        return value

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any) -> Any:
        result = closure()
        self.said.append("steps")
        return result


def test_methods_are_marked_while_the_window_is_open_and_not_after() -> None:
    marks = Recorded()
    phases, steps = Phases(marks), Steps(marks.said)
    phases.mark(steps, "training_step", "forward")
    phases.mark_after_closure(steps, "optimizer")
    assert steps.optimizer_step(None, model=steps, closure=lambda: steps.training_step(5)) == 5
    assert marks.said == [
        "<shardwise::forward", "computes", "shardwise::forward>", "<shardwise::optimizer", "steps",
        "shardwise::optimizer>",
    ]  # fmt: skip
    steps.automatic_optimization = False
    del marks.said[:]
    steps.optimizer_step(None, model=steps, closure=lambda: None)
    assert marks.said == ["<shardwise::optimizer", "steps", "shardwise::optimizer>"]
    phases.remove()
    assert set(vars(steps)) == {"said", "automatic_optimization"}


def test_an_outer_mark_closes_those_within() -> None:
    marks = Marks(nvtx=True)  # a build for the CPU has no NVTX: nothing is raised
    marks.open("step")
    marks.open("data")
    marks.close("step")
    marks.close("data")
    marks.close_all()


def test_layers_are_marked_by_hooks_that_are_removed() -> None:
    marks, layer = Recorded(), torch.nn.Linear(1, 1)
    phases = Phases(marks)
    phases.mark_units({"blocks.0": layer})
    layer(torch.ones(1, 1))
    assert marks.said == ["<unit blocks.0", "unit blocks.0>"]
    phases.remove()
    assert not layer._forward_hooks and not layer._forward_pre_hooks


def test_a_request_is_read_once_it_is_whole(tmp_path: Path) -> None:
    request = Request(steps=3)
    assert read_request(tmp_path) is None
    write_request(tmp_path, request)
    assert read_request(tmp_path) == request and read_answer(tmp_path, request) is None
    write_answer(tmp_path, Answer(request.id, "begun", "folder"))
    assert read_answer(tmp_path, request) == Answer(request.id, "begun", "folder")
    assert read_answer(tmp_path, Request()) is None
    remove_request(tmp_path, Request())
    assert read_request(tmp_path) == request
    remove_request(tmp_path, request)
    assert read_request(tmp_path) is None


ANSWERS: dict[str, tuple[str | None, str]] = {  # what a run does with the request → what the user reads of it
    "nothing": (None, "the run in {} has not answered for 1 s: it trains no step yet, was started by an earlier "
                      "version, or hangs; see its logs/"),
    "seen": ("", "no profile after wait_seconds=1: the run has seen the request; give it more, or look into {} later"),
    "begun": ("", "no profile after wait_seconds=1: the run is being profiled; give it more, or look into {} later"),
    "failed": ("the run has ended with step 9", "{}: the run has ended with step 9"),
    "dies": (None, "the run in {} is not under way: it was stopped, or has died; start it with profile.start=N to "
                   "profile its step N"),
}  # fmt: skip


@pytest.mark.parametrize("does", ANSWERS)
def test_a_run_that_gives_no_profile_is_not_waited_for_for_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], does: str
) -> None:
    text, message = ANSWERS[does]
    (tmp_path / "plan.json").write_text("{}")
    trains = os.open(tmp_path, os.O_RDONLY)  # the lock of a process that trains
    fcntl.flock(trains, fcntl.LOCK_EX)

    def react() -> None:
        while (request := read_request(tmp_path)) is None:
            time.sleep(0.02)
        if text is not None:
            write_answer(tmp_path, Answer(request.id, does, text))  # type: ignore[arg-type]
        elif does == "dies":
            os.close(trains)

    run = threading.Thread(target=react)
    run.start()
    try:
        assert main(["profile", str(tmp_path), "wait_seconds=1"]) == 2
    finally:
        run.join()
        if does != "dies":
            os.close(trains)
    said = capsys.readouterr().err
    assert said.strip().endswith(message.format(tmp_path)) and said.count("\n") == 1
    assert read_request(tmp_path) is None, "the request is taken back"


FAKE_NSYS = """#!/bin/sh
# Records its words, runs the rest, and leaves a report, whose name it fills in as nsys does.
printf '%s\\n' "$@" > "$NSYS_SAID"
shift
while case "$1" in --*) true ;; *) false ;; esac; do
    case "$1" in --output=*) output=$(printf %s "${1#--output=}" | sed "s/%q{RANK}/$RANK/; s/%%/%/g") ;; esac
    shift
done
touch "$output.nsys-rep" || exit 1
exec "$@"
"""


def test_nsys_is_put_before_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake = tmp_path / "bin/nsys"
    fake.parent.mkdir()
    fake.write_text(FAKE_NSYS)
    fake.chmod(0o755)
    made = cell_plan(tmp_path / "at 1%/run", 1, "micro_batch_size=2", "global_batch_size=2", "max_steps=2")
    plan = dataclasses.replace(made, profile=ProfileConfig(start=2, tool="nsys"))
    with pytest.raises(ConfigError, match="profile.tool=nsys: there is no nsys on the PATH"):
        check_profiler(plan)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("NSYS_SAID", str(tmp_path / "said"))
    folder = profile_folder(plan.run_dir, 2)
    check_profiler(plan)
    assert launch(plan, in_process=True) == 0
    said = capfd.readouterr().out
    assert "none is taken" not in said
    assert "step 2/2" in said and said.endswith(f"\nprofile: nsys stats and nsys-ui read the reports in {folder}\n")
    assert (folder / "rank-0.nsys-rep").exists()
    words = (tmp_path / "said").read_text().splitlines()
    output = str(folder).replace("%", "%%") + "/rank-%q{RANK}"
    assert words[: len(NSYS)] == [*NSYS[1:], f"--output={output}"]
    assert words[len(NSYS) :] == [sys.executable, "-u", "-m", "shardwise.launch.worker"]


def test_the_batch_script_puts_the_same_words_before_a_run() -> None:
    script = (ROOT / "slurm/job.sh").read_text()
    [words] = re.findall(r"profiler=\((nsys .*?)\)", script, flags=re.S)
    assert shlex.split(words)[: len(NSYS)] == list(NSYS)
    assert shlex.split(words)[len(NSYS)].endswith("/profile/rank-%q{SLURM_PROCID}")


def test_a_report_of_ncu_is_named_only_if_it_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned("profile.start=2", "devices=1", "profile.tool=ncu", f"runs_dir={tmp_path}")
    make_folder(plan)
    show_reports(plan)
    assert "ncu has written no report into" in capsys.readouterr().out
    (profile_folder(plan.run_dir, 2) / "rank-0.ncu-rep").touch()
    show_reports(plan)
    assert "ncu-ui opens" in capsys.readouterr().out


def test_ncu_records_one_rank() -> None:
    plan = planned("profile.start=2", "devices=1", "profile.tool=ncu")
    words = words_before(plan, 0)
    assert words[0] == "ncu" and words[-1] == f"--export={profile_folder(plan.run_dir, 2)}/rank-0"
    assert words_before(planned("profile.start=2"), 0) == []
    assert words_before(planned("profile.start=2", "profile.tool=nsys"), 1) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["wait_seconds=-1"], "wait_seconds=-1: must be at least 1"),
        (["wait_seconds=nan"], "wait_seconds=nan: must be at least 1"),
        (["--steps", "0"], "steps=0: must be from 1 to 100; one is usually enough"),
        (
            ["--stacks", "false", "runs/other"],
            "shardwise profile takes the folder of one run: shardwise profile runs/NAME",
        ),
        (["stacks=maybe"], "stacks=maybe: must be true or false"),
        (["--ranks", "3"], "ranks=3: must be 0 or all; others are said at the start: profile.ranks=[3]"),
    ],
)
def test_a_wrong_word_of_a_request_is_one_message(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(tmp_path), *words]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
