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


def test_a_step_by_hand_with_parameters_outside_its_networks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ByHandWithLoose optimizes by hand and owns parameters itself: fsdp"):
        spawn(2, run, tmp_path, "ByHandWithLoose", [])


@pytest.mark.parametrize("module", ["DividedReads", "DividedReadsWeights", "DividedLogs", "DividedClips"])
def test_parts_of_a_tensor_axis_are_not_read(tmp_path: Path, module: str) -> None:
    with pytest.raises(AssertionError, match="reads numbers of gradients or weights, of which each rank has a part"):
        spawn(2, run, tmp_path, module, TENSOR)


def test_rows_of_parts_of_a_tensor_axis_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="DividedWrites or a callback writes into a part of a gradient or weight"):
        spawn(2, run, tmp_path, "DividedWrites", TENSOR)


def test_parts_of_a_tensor_axis_may_be_changed(tmp_path: Path) -> None:
    spawn(2, run, tmp_path, "DividedChanges", TENSOR)


@pytest.mark.parametrize("module", ["DividedKeeps", "DividedRuns"])
def test_hooks_on_a_tensor_axis_see_whole_weights_and_write_them(tmp_path: Path, module: str) -> None:
    expected = spawn(1, run, tmp_path / "one", module, ["strategy=ddp", "devices=1"])[0]
    found = spawn(2, run, tmp_path / "two", module, TENSOR)[0]
    assert all(len(set(values)) == 2 for values in expected.values()) and found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-9), name


def test_layers_that_run_in_a_hook_have_the_weights_that_it_has_written(tmp_path: Path) -> None:
    cells = {"ddp fp64": 0.0, "fsdp fp64": 1e-9, "ddp fp32": 0.0, "ddp bf16": 3e-2, "fsdp bf16": 3e-2}
    found = {}
    for name in cells:
        strategy, precision = name.split()
        words = [f"strategy={strategy}", f"precision={precision}"]
        found[name] = spawn(2, run, tmp_path / name, "Evaluates", words)[0]
    assert len(found["ddp fp64"]) == 10
    for name, tolerance in cells.items():
        for key, values in found["ddp fp64" if "fp64" in name else "ddp fp32"].items():
            assert found[name][key] == pytest.approx(values, rel=tolerance), (name, key)
    for key, values in found["ddp bf16"].items():
        assert found["fsdp bf16"][key] == pytest.approx(values, rel=1e-5), key


def test_layers_that_run_between_two_passes_have_the_weights_of_then(tmp_path: Path) -> None:
    """And leave none behind: the validation after the step has those of then, too."""
    found = {}
    for name in ("ddp fp64", "fsdp fp64", "ddp fp32", "fsdp bf16", "ddp bf16", "zero2 bf16", "zero3 bf16"):
        strategy, precision = name.split()
        words = [f"strategy={strategy}", f"precision={precision}"]
        found[name] = spawn(2, run, tmp_path / name, "RunsBetween", words)[0]
        assert len(found[name]) == 5, found[name]
        for key, values in found["ddp fp64" if "fp64" in name else "ddp fp32"].items():
            assert found[name][key] == pytest.approx(values, rel=3e-2 if "bf16" in name else 1e-9), (name, key)


def test_a_hook_that_copies_layers_is_told_where_to(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="on_fit_start of Copies or of a callback copies layers that fsdp shards"):
        spawn(2, run, tmp_path, "Copies", [])
