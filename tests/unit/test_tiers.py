"""The quick tier has every strategy and every file of tests; --tier divides all tests in three."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.plan.capabilities import STRATEGIES
from tests import conftest, quick

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


def functions(file: str) -> set[str]:
    return {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_strategy_has_a_run_in_the_quick_tier() -> None:
    assert STRATEGIES.keys() <= quick.RUNS.keys()
    assert all(quick.RUNS.values())


def test_ci_runs_a_test_of_every_file_or_says_why_not() -> None:
    ours = {one.partition("::")[0] for one in quick.listed()} | quick.LEFT_OUT.keys()
    files = {file for file in FILES if not file.startswith(quick.UNITS)}
    assert files == ours, f"tests/quick.py must list a test of each of these, or say why not: {sorted(files ^ ours)}"


def test_the_list_names_tests_that_there_are_and_no_whole_file() -> None:
    for one in [*quick.listed(), *quick.HEAVY, *quick.LONG_UNITS]:
        file, _, test = one.partition("::")
        assert (ROOT / file).exists() and (not test or test.partition("[")[0] in functions(file)), one
    assert all("::" in one for one in quick.listed(quick.RUNS))


def selected(tier: str | None, argument: str, tests: list[str]) -> list[str]:
    """What tests/conftest.py leaves of these tests, with `--tier` and an argument of pytest's."""
    left_out: list[list[Any]] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.append(items))
    config: Any = SimpleNamespace(option=SimpleNamespace(tier=tier), args=[argument], hook=hook)
    items: Any = [SimpleNamespace(nodeid=test) for test in tests]
    conftest.pytest_collection_modifyitems(config, items)
    assert sorted(item.nodeid for item in [*items, *(item for some in left_out for item in some)]) == sorted(tests)
    return [item.nodeid for item in items]


def test_a_folders_tests_are_those_of_a_tier_and_a_file_is_run_whole() -> None:
    in_it, other = f"{quick.listed(quick.RUNS)[0]}[one]", f"{quick.HEAVY[0]}[two]"
    long = "tests/distributed/test_chaos.py::test_d[one]"
    tests = [in_it, other, long, "tests/unit/test_plan.py::test_c"]
    assert selected(None, "tests", tests) == selected("quick", "tests", tests) == [in_it, tests[3]]
    assert selected("rest", "tests", tests) == [other] and selected("long", "tests", tests) == [long]
    assert selected("all", "tests", tests) == selected(None, "tests/distributed/test_chaos.py", tests) == tests


def test_a_line_of_the_list_that_names_no_test_ends_the_start() -> None:
    with pytest.raises(pytest.UsageError, match=r"lists what is no test: tests/distributed/test_launch.py::"):
        selected(None, "tests", [f"{quick.FOLDER}/test_launch.py::test_b"])
