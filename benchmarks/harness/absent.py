"""Stand-ins for Pillow and matplotlib where they are not installed. Imported before what imports the image recipe."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from typing import Any
from unittest.mock import MagicMock

PILLOW = importlib.util.find_spec("PIL") is not None


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Without Pillow the recipe and matplotlib cannot be imported: what does not decode or draw works with these."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        known = name.partition(".")[0] in ("PIL", "matplotlib")
        return importlib.util.spec_from_loader(name, self, is_package=True) if known else None

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(__name__=spec.name, __path__=[])
        module.DecompressionBombError = module.UnidentifiedImageError = OSError  # caught by name
        module.subplots.return_value = (MagicMock(), MagicMock())
        return module

    def exec_module(self, module: Any) -> None:
        pass


if not PILLOW:
    sys.meta_path.insert(0, StandIns())
