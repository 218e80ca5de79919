"""Peers that share samples are counted once: tokens of the global batch, FLOPs of the whole model over all devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.divided_meter import PEAK, run_hugging_face, run_measured
from tests.harness.divided_stages import LAYOUTS
from tests.harness.hugging_face import STEPS
from tests.harness.processes import spawn


def test_tokens_and_flops_are_those_of_one_process(tmp_path: Path) -> None:
    one = spawn(1, run_measured, tmp_path / "one", 1, {"one": []})[0]["one"]
    assert len(one["counted"]) == 3 and all(weight > 0 and flops > 0 for weight, flops in one["counted"])
    two = spawn(2, run_measured, tmp_path / "two", 2, {"fsdp": [], **LAYOUTS})[0]
    for name, found in two.items():
        assert found["counted"] == one["counted"], name
    for ranks, runs in ((1, {"one": one}), (2, two)):
        for name, found in runs.items():
            assert len(found["rows"]) == 3, name
            for row, (weight, flops) in zip(found["rows"], found["counted"], strict=True):
                seconds = float(row["train/step_seconds"])
                assert float(row["train/mfu"]) == pytest.approx(flops / (seconds * ranks * PEAK * 1e12)), name
                assert float(row["train/tokens_per_second"]) == pytest.approx(weight / seconds), name


def test_tokens_of_a_hugging_face_model_are_those_of_one_process(tmp_path: Path) -> None:
    """On a context axis each rank is given whole batches, and counts its share of them."""
    [one] = spawn(1, run_hugging_face, tmp_path / "one", 1, {"one": ()})
    expected = one["one"]
    assert len(expected) == STEPS and all(weight > 0 for weight, _ in expected)
    layouts = {axis: (f"strategy.{axis}_parallel_size=2",) for axis in ("tensor", "context", "pipeline")}
    for name, found in spawn(2, run_hugging_face, tmp_path / "two", 2, layouts)[0].items():
        assert found == expected, name
