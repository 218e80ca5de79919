"""What the tests stand on: ranks that are forks of this checkout, with everything imported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.harness.processes import spawn

ROOT = Path(__file__).resolve().parents[2]


def at_the_beginning() -> tuple[list[str], Any]:
    """In a rank: what it would have to import, and whose code it has."""
    preload = sys.modules["tests.harness.preload"]
    return [name for name in preload.MODULES if name not in sys.modules], sys.modules["shardwise"].__file__


def test_a_rank_begins_with_this_checkouts_code_and_all_imports() -> None:
    ((missing, code),) = spawn(1, at_the_beginning)
    assert not missing
    assert Path(code).is_relative_to(ROOT / "src")
