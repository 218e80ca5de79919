"""Benchmarks stay small, can be imported, and are where the docs say."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_checks.first_steps import compare
from benchmarks.harness import storage

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
FILES = {str(path.relative_to(ROOT)): path for path in sorted(FOLDER.rglob("*.py"))}
COMMANDS = [path.stem for path in sorted(FOLDER.glob("*.py")) if "__name__" in path.read_text()]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *sorted((ROOT / "docs").glob("*.md"))]
LONGEST = 300  # lines


def too_long(path: Path) -> list[str]:
    """What is longer than it may be. A file that has to be says so in its first line: `… longer than 300 lines: …`."""
    text = path.read_text()
    lines = text.splitlines()
    found = [f"{path.name}: {len(lines)} lines"] if len(lines) > LONGEST else []
    if found and f"longer than {LONGEST} lines: " in lines[0]:
        found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and (node.end_lineno or 0) - node.lineno >= LONGEST:
            found.append(f"{path.name}: class {node.name}")
    return found


def test_no_file_and_no_class_is_long() -> None:
    assert not [found for path in FILES.values() for found in too_long(path)]


def test_what_is_long_is_found(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text('"""Words."""\nclass Long:\n' + "    a = 1\n" * 300)
    assert too_long(path) == ["long.py: 302 lines", "long.py: class Long"]
    path.write_text('"""Words, longer than 300 lines: one table."""\n' + "a = 1\n" * 300)
    assert not too_long(path)


def runs_of(path: Path, length: int) -> dict[tuple[str, ...], int]:
    """Every run of `length` lines of code → the line where it begins. Imports do not count, and neither do lines that
    are blank, a comment or a bracket."""
    lines = [(line.strip(), number) for number, line in enumerate(path.read_text().splitlines(), 1)]
    code = [
        (line, number) for line, number in lines if re.search(r"\w", line) and not re.match("import |from |#", line)
    ]
    windows = (code[i : i + length] for i in range(len(code) - length + 1))
    return {tuple(line for line, _ in window): window[0][1] for window in windows}


def test_nothing_is_written_twice() -> None:
    """Six lines of code stand in one place, in the benchmarks and in what they share with the tests."""
    seen: dict[tuple[str, ...], str] = {}
    twins = []
    for path in [*FILES.values(), *sorted((ROOT / "tests" / "harness").glob("*.py"))]:
        for run, number in runs_of(path, 6).items():
            where = f"{path.relative_to(ROOT)}:{number}"
            if (first := seen.setdefault(run, where)).split(":")[0] != where.split(":")[0]:
                twins.append(f"{first} ~ {where}")
    assert not twins


@pytest.mark.parametrize("name", COMMANDS)
def test_every_benchmark_says_what_it_does(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Much of them runs on GPUs alone: so far they are known to fit the code."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", "--help"])
    module = importlib.import_module(f"benchmarks.{name}")
    if name == "report":  # it takes no words
        return
    with pytest.raises(SystemExit, match="0"):
        module.main()
    assert "--commit" in capsys.readouterr().out


def test_classes_that_overrides_name_are_there() -> None:
    for path in FILES.values():
        for target in re.findall(r"_target_=((?:benchmarks|tests)[\w.]+)", path.read_text()):
            module, _, what = target.rpartition(".")
            assert hasattr(importlib.import_module(module), what), target


def test_what_a_crash_leaves_is_read_from_the_log(tmp_path: Path) -> None:
    """A file is written, synced and renamed; the folder is synced last."""
    lines = ["create\t/a\t-\t0\t0\t-1", "write\t/a\t-\t0\t3\t0", "fsync\t/a\t-\t0\t0\t-1",
             "rename\t/a\t/b\t0\t0\t-1", "fsync\t\t-\t0\t0\t-1"]  # fmt: skip
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    (tmp_path / "bytes").write_bytes(b"one")
    operations, written = storage.read(tmp_path)

    def after_power(before: int) -> list[storage.Tree]:
        return [storage.tree(operations, written, keeps) for _, keeps in storage.without_power(operations, before)]

    assert storage.tree(operations, written, storage.killed(1)) == {"a": b""}
    assert storage.tree(operations, written, storage.killed(4)) == {"b": b"one"}
    assert {"a": b""} in after_power(2) and {} in after_power(4) and {"b": b"one"} in after_power(4)
    assert {"a": b""} not in after_power(3) and after_power(5) == [{"b": b"one"}] * 3


def test_commands_in_the_docs_are_there() -> None:
    named = {name for page in PAGES for name in re.findall(r"benchmarks/(\w+\.py)", page.read_text())}
    assert "report.py" in named
    assert not {name for name in named if not (FOLDER / name).exists()}


@pytest.mark.parametrize(
    ("norms", "holds"),
    [
        ([6.4, 4.8, 4.7, 4.6], True),
        ([31.0, 4.8, 4.7, 4.6], False),
        ([6.4, 4.8, 4.7, 9.2], False),
        ([6.4, float("nan"), 4.7, 4.6], False),
    ],
)
def test_first_steps_with_other_gradients_do_not_hold(norms: list[float], holds: bool) -> None:
    reference = {"loss": [12.2, 12.1, 12.0, 11.9], "gradient_norm": [6.4, 4.8, 4.7, 4.6]}
    assert compare(reference | {"gradient_norm": norms}, reference)["holds"] is holds


def test_a_run_that_did_not_end_does_not_hold_and_one_without_its_package_is_left_out() -> None:
    assert not compare({"error": "did not end"}, {})["holds"] and compare({"left_out": "no GPU"}, {})["holds"]
