"""The quick tier has every strategy and every file of tests; --tier divides all tests in two."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from shardwise.config.schema import StrategyName
from tests import quick
from tests.harness.patience import run_patiently

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


def functions(file: str) -> set[str]:
    return {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_strategy_has_a_run_in_the_quick_tier() -> None:
    assert {strategy.value for strategy in StrategyName} <= quick.RUNS.keys()
    assert all(quick.RUNS.values())


def test_every_file_of_tests_is_in_the_quick_tier_or_says_why_not() -> None:
    ours = {one.partition("::")[0] for one in quick.listed()} | quick.LEFT_OUT.keys()
    assert {file for file in FILES if not file.startswith(quick.UNITS)} == ours


def test_the_list_names_tests_that_there_are() -> None:
    for one in quick.listed():
        file, _, test = one.partition("::")
        assert not test or test.partition("[")[0] in functions(file), one


def collected(*words: str) -> list[str]:
    done = run_patiently(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *words], 60, cwd=ROOT,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_the_two_tiers_are_all_tests_and_a_named_file_is_run_whole() -> None:
    folder, file = quick.FOLDER, f"{quick.FOLDER}/test_leaving.py"
    tiers = {tier: collected(f"--tier={tier}", folder) for tier in ("quick", "rest", "all")}
    assert sorted(tiers["quick"] + tiers["rest"]) == sorted(tiers["all"])
    assert collected(folder) == tiers["quick"] and len(tiers["quick"]) > 40
    assert collected(file) == [test for test in tiers["all"] if test.startswith(file)]
