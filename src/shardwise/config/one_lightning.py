"""One copy of Lightning's classes: `pytorch_lightning` is read as `lightning.pytorch`, `lightning_fabric` as
`lightning.fabric`.

The distribution `pytorch-lightning` holds the same classes a second time. A module of one copy is no LightningModule of
the other, so that Lightning's own Trainer refuses it. Here both names lead to the same module objects, whether that
distribution is installed or not. Nothing is imported before somebody asks for one of the names.
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
    """From here on, in this process, the names of `SAME` lead to the same modules."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


_told: set[str] = set()


def newly_used() -> list[str]:
    """What to tell the user once: which names were used for which, of those that were not told before."""
    used = [n for n, real in SAME.items() if (m := sys.modules.get(n)) is not None and m is sys.modules.get(real)]
    new = [name for name in used if name not in _told]
    _told.update(new)
    version = getattr(sys.modules.get("lightning"), "__version__", "?")
    return [f"{n} is read as {SAME[n]} (version {version}): they are the same classes" for n in new]


def second_copy() -> str:
    """A sentence to append to a message about a class that is not Lightning's: why it may not be. Else nothing."""
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
            return None  # below a second copy everything is the copy's
        real = SAME[root] + dot + rest
        # The first part of `lightning.pytorch` is looked for without importing it: a look at what is installed is free.
        if importlib.util.find_spec(real if dot else "lightning") is None:
            return None
        return ModuleSpec(name, _Loader(real))


class _Loader(Loader):
    """Gives the module that is there under its real name, and leaves it as it is."""

    def __init__(self, real: str) -> None:
        self.real = real
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.real)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import system has just put the other name's there
