"""What several pages are made of: tables, and the words about where something was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a table: its head, the rule below it, and one line for each row. None is a cell without content."""
    return [_line(column or None for column in columns), "|" + "---|" * len(columns), *map(_line, rows)]


def _line(cells: Iterable[Any]) -> str:
    return "|" + "".join(" |" if cell is None else f" {cell} |" for cell in cells)


def device_of(result: dict[str, Any], otherwise: str, *, default: str) -> str:
    """The name of the GPUs that the benchmark used, or `otherwise` where it ran on the CPU. Its command says which, or
    leaves it at the benchmark's `default`."""
    on_gpus = "--accelerator cuda" in result["command"] or (
        default == "cuda" and "--accelerator cpu" not in result["command"]
    )
    return str(result["environment"]["gpus"][0]) if on_gpus else otherwise


def versions(environment: dict[str, Any], *more: str) -> str:
    """The versions of torch and Lightning, `more`, and the version of Python."""
    packages = environment["packages"]
    told = [f"torch {packages['torch']}", f"Lightning {packages['lightning']}", *more]
    return ", ".join([*told, f"Python {environment['python']}"])


def torch_and_commit(environment: dict[str, Any]) -> str:
    return f"torch {environment['packages']['torch']}, {commit_of(environment)}"


def commit_of(environment: dict[str, Any]) -> str:
    return f"commit {(environment['commit'] or 'unknown')[:10]}"


def commits_of(parts: Iterable[dict[str, Any]]) -> str:
    """The commits of a result whose parts were measured at different times."""
    return ", ".join(sorted({str(part["commit"])[:10] for part in parts}))
