"""Stages other than fit, and samples at validation, in layouts that divide layers or sequences: as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.divided_stages import LAYOUTS, run_samples, run_stages, save
from tests.harness.processes import spawn


def test_validation_and_test_measure_what_one_process_measures(tmp_path: Path) -> None:
    """Of a set whose last batch is smaller, with targets masked unevenly."""
    [saved] = spawn(1, save, tmp_path / "saved")
    expected = spawn(1, run_stages, tmp_path / "one", saved, 1, {"one": []})[0]["one"]
    assert {"validation/loss", "test/loss"} <= expected.keys()
    for rank in spawn(2, run_stages, tmp_path / "two", saved, 2, LAYOUTS):
        for name in LAYOUTS:
            assert rank[name] == pytest.approx(expected, rel=1e-12), name


def test_samples_are_those_of_one_process(tmp_path: Path) -> None:
    """A pipeline refuses them before it starts; see tests/configs/test_bad_input.py."""
    layouts = {name: words for name, words in LAYOUTS.items() if "pipeline" not in str(words)}
    [one] = spawn(1, run_samples, tmp_path / "one", 1, {"one": []})
    assert one["one"].count("=== step") == 2
    for rank in spawn(2, run_samples, tmp_path / "two", 2, layouts):
        assert rank == dict.fromkeys(layouts, one["one"])
