"""What a module notes on its parameters is there under every strategy, or there is one message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwise.distributed.parameters import keep_notes
from tests.harness.notes import moved, run
from tests.harness.processes import spawn

CASES = {  # words of a run → its ranks
    "strategy=ddp": 2, "strategy=fsdp": 2, "strategy=fsdp devices=1": 1,
    "strategy=zero3 precision=fp32": 2,
    "strategy=fsdp strategy.pipeline_parallel_size=2": 2,
}  # fmt: skip
PLACES = ["init", "configure_optimizers", "on_train_start"]
WEIGHT = "first.weight"


@pytest.mark.parametrize("words", CASES)
def test_attributes_stay_on_parameters(tmp_path: Path, words: str) -> None:
    for found in spawn(CASES[words], run, tmp_path, "Marks", words.split()):
        assert list(found["marks"].values()) == list(range(12)), "configure_optimizers"
        here = [number for number in found["in a hook"].values() if number >= 0]
        assert len(here) == 12 or ("pipeline" in words and len(here) >= 4)
        assert found["late"] == 7 or "pipeline" in words


def test_attributes_stay_on_parts_of_a_tensor_axis(tmp_path: Path) -> None:
    found = spawn(2, run, tmp_path, "DividedMarks", ["strategy=fsdp", "strategy.tensor_parallel_size=2"])[0]
    assert list(found["marks"].values()) == list(range(len(found["marks"])))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hook_behind_a_gradient_is_called(tmp_path: Path, place: str, ranks: int) -> None:
    runs = {"usual": ("ddp", "Plain"), "ddp": ("ddp", f"behind_{place}"), "fsdp": ("fsdp", f"behind_{place}")}
    found = {
        name: moved(spawn(ranks, run, tmp_path / name, module, [f"strategy={strategy}", f"devices={ranks}"])[0], WEIGHT)
        for name, (strategy, module) in runs.items()
    }
    assert not torch.allclose(found["usual"], found["ddp"])
    torch.testing.assert_close(found["fsdp"], found["ddp"])


@pytest.mark.parametrize("place", PLACES)
def test_a_hook_on_a_gradient_is_called_or_refused(tmp_path: Path, place: str) -> None:
    found = spawn(2, run, tmp_path / "ddp", f"on_gradient_{place}", ["strategy=ddp"])[0]
    plain = spawn(2, run, tmp_path / "plain", "Plain", ["strategy=ddp"])[0]
    assert not torch.allclose(moved(found, WEIGHT), moved(plain, WEIGHT))
    with pytest.raises(AssertionError, match="hook on the gradient of first.weight .*not called under fsdp"):
        spawn(2, run, tmp_path / "fsdp", f"on_gradient_{place}", ["strategy=fsdp"])


def test_a_hook_on_what_is_frozen_at_the_moment_goes_along() -> None:
    old, called = torch.nn.Parameter(torch.ones(2)), list[int]()
    old.register_hook(lambda gradient: called.append(1))  # type: ignore[no-untyped-call]
    new = keep_notes(torch.nn.Parameter(torch.ones(2), requires_grad=False), old.requires_grad_(False))
    assert not new.requires_grad
    new.requires_grad_().sum().backward()  # type: ignore[no-untyped-call]
    assert called == [1]
