"""Imports `pytorch_lightning` as `lightning.pytorch`, and `lightning_fabric` as `lightning.fabric`.

The distribution `pytorch-lightning` has the same classes a second time. A module of one copy is no LightningModule of
the other, and Lightning's Trainer refuses it. With this file both names give the same module objects, even if that
distribution is not installed. Nothing is imported before somebody imports one of the names.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

SAME = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def read_as_one() -> None:
    """Let both names in `SAME` give the same modules, in this process from now on."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


_reported: set[str] = set()


def newly_used() -> list[str]:
    """Lines for the user about names that were replaced, each only once."""
    used = [n for n, real in SAME.items() if (m := sys.modules.get(n)) is not None and m is sys.modules.get(real)]
    new = [name for name in used if name not in _reported]
    _reported.update(new)
    version = getattr(sys.modules.get("lightning"), "__version__", "?")
    return [f"{n} is read as {SAME[n]} (version {version}): they are the same classes" for n in new]


def second_copy() -> str:
    """The end of a message about a class that is not Lightning's, if a second copy may be the cause; else empty."""
    for name, real in SAME.items():
        module = sys.modules.get(name)
        if module is not None and module is not sys.modules.get(real):
            return (
                f"; {name} was imported as a second copy of Lightning's classes before this program could read it as "
                f"{real}: import it later (not in sitecustomize or a .pth file), or import {real}"
            )
    return ""


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, dot, rest = name.partition(".")
        if root not in SAME or (dot and sys.modules.get(root) is not sys.modules.get(SAME[root])):
            return None  # the submodules of a second copy are its own
        real = SAME[root] + dot + rest
        # find_spec("lightning") imports nothing, while find_spec("lightning.pytorch") would import `lightning`.
        if importlib.util.find_spec(real if dot else "lightning") is None:
            return None
        return ModuleSpec(name, _Loader(real))


class _Loader(Loader):
    """Gives the module of the real name, without a change to it."""

    def __init__(self, real: str) -> None:
        self.real = real
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.real)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import system has set that of the other name
