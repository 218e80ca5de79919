"""What a module reads of gradients and weights is of whole ones, although ranks hold parts; or it gets one message."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.gradient_hooks import run
from tests.harness.processes import spawn

TENSOR = ["strategy.tensor_parallel_size=2"]


@pytest.mark.parametrize("module", ["Reads", "ReadsWeights", "Clips"])
def test_what_is_read_is_of_whole_tensors(tmp_path: Path, module: str) -> None:
    expected = spawn(1, run, tmp_path / "one", module, ["strategy=ddp", "devices=1"])[0]
    found = spawn(2, run, tmp_path / "two", module, [])[0]
    assert expected and found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-6), name


def test_what_a_step_by_hand_reads_is_of_whole_gradients(tmp_path: Path) -> None:
    expected, found = (spawn(2, run, tmp_path / name, "ByHand", [f"strategy={name}"])[0] for name in ("ddp", "fsdp"))
    assert expected["own/total"] and found["own/total"] == pytest.approx(expected["own/total"], rel=1e-9)


@pytest.mark.parametrize("module", ["DividedReads", "DividedReadsWeights", "DividedLogs", "DividedClips"])
def test_parts_of_a_tensor_axis_are_not_read(tmp_path: Path, module: str) -> None:
    with pytest.raises(AssertionError, match="reads numbers of gradients or weights, of which each rank has a part"):
        spawn(2, run, tmp_path, module, TENSOR)


def test_parts_of_a_tensor_axis_may_be_changed(tmp_path: Path) -> None:
    spawn(2, run, tmp_path, "DividedChanges", TENSOR)
