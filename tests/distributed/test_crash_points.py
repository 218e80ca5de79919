"""A crash at every operation of a short run on its folder. benchmarks/crash_points.py tries more of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.crash_points import try_layout
from benchmarks.harness import storage


@pytest.mark.skipif(shutil.which("cc") is None, reason="the recorder has to be compiled")
def test_from_what_a_crash_leaves_a_run_comes_to_the_same_end(tmp_path: Path) -> None:
    """Two saves, a best one of links that is replaced by one of copies, and retention."""
    found = try_layout("ddp short", 1, tmp_path, storage.build(tmp_path))
    assert found["operations"]["link"] > 3 and found["kills"]["states"] > 40
    assert not found["power"]["wrong"] and not found["kills"]["wrong"]
