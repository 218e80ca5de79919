"""Which of the packages that shardwise can use are installed, and what each missing one would bring. No torch."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config.paths import ROOT
from shardwise.plan.choices import installed

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Package:
    """A package that pyproject.toml or a requirements file asks for."""

    name: str
    asked: str  # which versions, e.g. ">=2.11,<2.14"; empty: any
    version: str | None  # that is installed; None: none
    fits: bool  # whether it is one of those; True where that cannot be told
    brings: str = ""  # what it is good for, by the comment beside it
    install: str = ""  # the command that brings it


def required(root: Path = ROOT) -> list[Package]:
    """What every run needs. Empty: there is no pyproject.toml."""
    project = _read(root / "pyproject.toml").get("project", {})
    made = [_package(word, install="pip install -r requirements.txt") for word in project.get("dependencies", [])]
    if python := project.get("requires-python"):
        import platform

        version = platform.python_version()
        made.append(Package("python", python, version, _fits(version, python), install="install another Python"))
    return made


def optional(root: Path = ROOT) -> list[Package]:
    """The extras of pyproject.toml, each with the comment beside it and the command that installs it."""
    path = root / "pyproject.toml"
    extras: dict[str, list[str]] = _read(path).get("project", {}).get("optional-dependencies", {})
    lines = path.read_text().splitlines() if extras else []
    made = []
    for extra, words in extras.items():
        own = root / f"requirements-{extra}.txt"
        install = f"pip install -r {own.name}" if own.exists() else f"pip install -e '.[{extra}]'"
        above = _comment(lines, rf"^{re.escape(extra)}\s*=")
        made += [
            _package(w, install, _comment(lines, re.escape(f'"{w}"')) or above or f"the extra {extra}") for w in words
        ]
    return made


def other_files(root: Path = ROOT) -> Iterator[tuple[str, str, list[str]]]:
    """Every other requirements-*.txt: its name, what its first line says, and the packages of it that are missing."""
    extras = _read(root / "pyproject.toml").get("project", {}).get("optional-dependencies", {})
    for path in sorted(root.glob("requirements-*.txt")):
        if path.stem.removeprefix("requirements-") not in extras:
            text = path.read_text()
            names = [m[0] for line in text.splitlines() if (m := _NAME.match(line))]
            first = text.partition("\n")[0].lstrip("# ").rstrip(".")
            yield path.name, first, [name for name in names if installed(name) is None]


def _comment(lines: list[str], pattern: str) -> str:
    """The comment at the end of the first line that has `pattern`."""
    line = next((line for line in lines if re.search(pattern, line)), "")
    return line.partition(" # ")[2].strip()


def _package(word: str, install: str, brings: str = "") -> Package:
    found = _NAME.match(word)
    assert found is not None
    asked = re.sub(r"^\[[^\]]*\]", "", word[found.end() :]).partition(";")[0].strip()
    version = installed(found[0])
    return Package(found[0], asked, version, version is None or _fits(version, asked), brings, install)


def _fits(version: str, asked: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
        from packaging.version import Version
    except ImportError:  # torch and lightning bring it
        return True
    return bool(SpecifierSet(asked).contains(Version(version).public, prereleases=True))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError:  # installed without its sources
        return {}
