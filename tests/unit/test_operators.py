"""A build of DeepSpeed's that was killed leaves a lock behind, and nobody waits for it."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

operators = pytest.importorskip("shardwise.optim.deepspeed_operators")


def test_a_lock_of_the_dead_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "an_op"
    folder.mkdir()
    lock, seen = folder / "lock", []
    monkeypatch.setattr(operators, "_get_build_directory", lambda name, verbose: str(tmp_path / name))
    monkeypatch.setattr(operators, "_jit_load", lambda op, verbose: seen.append(lock.exists()))
    operator = SimpleNamespace(name="an_op")
    lock.touch()
    operators._load(operator)
    # But who builds there is waited for
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"], cwd=folder) as builder:
        lock.touch()
        operators._load(operator)
        assert builder.poll() is not None
    assert seen == [False, False]


def test_two_environments_do_not_undo_each_others_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators.OpBuilder, "jit_load", operators._jit_load)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "")  # what stood there before comes back
    folders = []
    for prefix in ("/a/.venv", "/b/.venv", "/a/.venv"):
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        monkeypatch.setattr(sys, "prefix", prefix)
        operators.watch_builds()
        folders.append(os.environ["TORCH_EXTENSIONS_DIR"])
    assert folders[0] == folders[2] != folders[1]
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/chosen")
    operators.watch_builds()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == "/chosen"
