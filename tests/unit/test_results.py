"""Files of results: nothing recorded is lost, and what a benchmark cannot do it says in one line before it begins."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import breadth_gpu, images_gpu, race, report
from benchmarks.harness import results

MAINS = {"breadth_gpu": breadth_gpu.main, "images_gpu": images_gpu.main, "race": race.main}
TRY = ["--accelerator", "cpu", "--tiny", "--commit", "a" * 40]


def call(monkeypatch: pytest.MonkeyPatch, program: str, out: Path, *words: str) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(sys, "argv", [f"{program}.py", *TRY, "--out", str(out), *words])
    try:
        MAINS[program]()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise RuntimeError("something was measured")

    monkeypatch.setattr(breadth_gpu, "on_ranks", run)
    monkeypatch.setattr(race.commands, "run", run)
    monkeypatch.setattr(images_gpu, "observe_plain", run)
    monkeypatch.setattr(images_gpu, "through_trainer", run)
    monkeypatch.setattr(images_gpu, "init_process_group", lambda plan: None)
    monkeypatch.setattr(images_gpu.torch.distributed, "destroy_process_group", lambda: None)


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [
        ("breadth_gpu", "--only nothing", "--only 'nothing' is in none of: shardwise gpt2_124m ddp bf16; "),
        ("breadth_gpu", "--only (", "--only '(' is not a regular expression"),
        ("breadth_gpu", "--models gpt2_124m,none", "'none' is none of: gpt2_124m, resnet50"),
        ("breadth_gpu", "--ranks 2,0", "'2,0': give numbers from 1"),
        ("breadth_gpu", "--timeout 0", "'0': give a number of seconds above 0"),
        ("images_gpu", "--only nothing", "--only 'nothing' is in none of: resnet50: plain, compiled; "),
        ("images_gpu", "--only (", "--only '(' is not a regular expression"),
        ("images_gpu", "--sections resnet50,none", "'none' is none of: resnet50, vit_b16, vit_l16, jpeg"),
        ("race", "--timeout -5", "'-5': give a number of seconds above 0"),
        ("race", "--within nan", "'nan': give a number of seconds above 0"),
    ],
)
def test_a_wrong_word_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nothing_runs: None, capsys: pytest.CaptureFixture[str],
    program: str, words: str, message: str,
) -> None:  # fmt: skip
    with pytest.raises(SystemExit) as left:
        call(monkeypatch, program, tmp_path, *words.split())
    said = capsys.readouterr()
    assert left.value.code not in (0, None) and message in f"{left.value.code}{said.err}"
    assert "written" not in said.out and not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("program", MAINS)
def test_a_folder_that_takes_no_results_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nothing_runs: None, capsys: pytest.CaptureFixture[str],
    program: str,
) -> None:  # fmt: skip
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", Path("/proc/none")):
        with pytest.raises(SystemExit, match="2"):
            call(monkeypatch, program, out)
        assert f"'{out}' is no folder that can be written to" in capsys.readouterr().err


FILES = {"breadth_gpu": "breadth-cpu-x2-tiny.json", "images_gpu": "images-cpu.json", "race": "race-cpu-x1-tiny.json"}


@pytest.mark.parametrize("content", ["[]", '{"x": 1}', '{"cards": [{"cell": "best"}], "cells": [{}]}', "folder", "{"])
@pytest.mark.parametrize("program", MAINS)
def test_a_file_of_something_else_is_one_line_and_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nothing_runs: None, program: str, content: str
) -> None:
    path = tmp_path / FILES[program]
    path.mkdir() if content == "folder" else path.write_text(content)
    with pytest.raises(SystemExit, match=rf"error: {path} is no.*: mend it, or move it away"):
        call(monkeypatch, program, tmp_path)
    assert path.is_dir() or path.read_text() == content


def test_the_report_names_the_file_that_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    (tmp_path / "parity-x.json").write_text("{")
    with pytest.raises(SystemExit, match=r"parity-x.json is not JSON .*: mend it, or move it away"):
        report.main()


def test_a_second_process_does_not_take_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "race-x.json"
    results.earlier(path)
    there = f"from pathlib import Path; from benchmarks.harness import results; results.earlier(Path({str(path)!r}))"
    root = Path(results.__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}:{root}"}
    second = subprocess.run([sys.executable, "-c", there], capture_output=True, text=True, env=environment)
    assert second.returncode == 1
    assert second.stderr == f"error: another process writes {path}: wait until it has ended, or give another --out\n"


def test_a_file_system_without_locks_needs_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(results.fcntl, "lockf", refuse)
    assert results.earlier(tmp_path / "race-x.json") == {}


# images_gpu.py


def parts_of(path: Path, **more: Any) -> results.Parts:
    head = {"environment": {}, "tiny": True, "sections": {}}
    words = {"limit_seconds": 9, "commit": "a", "only": "", "prepare": lambda: None, "words": lambda row: "done"}
    return results.Parts(path, head, **{**words, **more})  # type: ignore[arg-type]


def test_what_is_recorded_stays_until_its_replacement_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nothing_runs: None
) -> None:
    path = tmp_path / FILES["images_gpu"]
    for name in ("plain, compiled", "plain, eager"):
        parts_of(path).part("resnet50", name, lambda: {"images_per_second": 1.0})
    before = json.loads(path.read_text())["sections"]["resnet50"]

    def interrupted(*_: Any, **__: Any) -> None:
        sys.exit(results.ENDED)

    monkeypatch.setattr(images_gpu, "image_step", interrupted)
    with pytest.raises(SystemExit, match="what the file of results had by then is still in it"):
        call(monkeypatch, "images_gpu", tmp_path, "--sections", "resnet50")
    assert json.loads(path.read_text())["sections"]["resnet50"] == before


def test_a_part_that_failed_or_was_skipped_takes_nothing_away(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    parts_of(path).skip("jpeg", "not there")
    parts_of(path).part("jpeg", "shards", dict)
    parts = parts_of(path)
    parts.part("jpeg", "shards", lambda: {}["none"])
    parts.skip("jpeg", "not there")
    with pytest.raises(SystemExit, match="a part failed"):
        parts.end()
    [(name, row)] = json.loads(path.read_text())["sections"]["jpeg"].items()
    assert name == "shards" and row["ok"]


# breadth_gpu.py

CELL = {"who": "shardwise", "model": "llama3_1b", "strategy": "fsdp", "precision": "bf16"}
ONE = ["--models", "llama3_1b", "--ranks", "2", "--only", "shardwise llama3_1b fsdp "]


def test_a_failure_takes_no_row_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good, outcomes = CELL | {"seconds_per_step": 1.0}, iter(["did not end", "", "did not end"])

    def on_ranks(ranks: int, function: Any, place: Path, *arguments: Any, timeout_seconds: float) -> None:
        if error := next(outcomes):
            raise AssertionError(error)
        (place / "rows.jsonl").write_text(json.dumps(good))

    monkeypatch.setattr(breadth_gpu, "on_ranks", on_ranks)
    path = tmp_path / "breadth-cpu-x2-tiny.json"
    for fails, row in ((True, CELL | {"error": "did not end"}), (False, good), (True, good)):
        with pytest.raises(SystemExit, match="error: a cell failed") if fails else contextlib.nullcontext():
            call(monkeypatch, "breadth_gpu", tmp_path, *ONE)
        assert json.loads(path.read_text())["cells"] == [row | {"commit": "a" * 40}]
    assert [file.name for file in tmp_path.glob("*.json")] == [path.name], "rows of a small model lie apart"
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert results.read("breadth") == [], "and are on no page"


def test_a_signal_ends_it_as_an_exception_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`on_ranks` ends its ranks where an exception leaves it."""

    def on_ranks(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(breadth_gpu, "on_ranks", on_ranks)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with pytest.raises(SystemExit, match=results.ENDED):
        call(monkeypatch, "breadth_gpu", tmp_path, *ONE)
    signal.signal(signal.SIGTERM, before)
