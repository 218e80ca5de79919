"""`strategy.context_parallel_size=` changes memory and no number: each rank computes a part of every sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardwise.nn.attention import kernels_that_ran
from shardwise.parallel.context_parallel import ContextParallel
from shardwise.plan.topology import Topology
from shardwise.run_dir.files import checkpoint_path
from tests.harness import context_example
from tests.harness.cells import fit
from tests.harness.context import BOUNDS, CLIP, Case, deviations, plan_of, run_cases
from tests.harness.processes import spawn
from tests.harness.varlen import as_on_a_gpu, calls

HYBRID = ("strategy=fsdp_hybrid", "strategy.shard_size=1")
CASES = {
    2: [
        Case(2, "heads", "fp32", "adamw", accumulate=2, clip=CLIP),
        Case(2, "heads", documents=True),
        Case(2, "keys", optimizer="adamw", accumulate=4, clip=CLIP),
        Case(2, "keys", documents=True, words=("activation_checkpointing=full",)),
        Case(2, "keys", length=14),  # runs of equal length from both ends do not fit
        Case(2, "keys", "fp32", words=("compile=layer",)),
    ],
    4: [
        Case(4, "heads", accumulate=2),
        Case(4, "keys", clip=CLIP, documents=True),
        Case(2, "heads", "fp32", accumulate=2, clip=CLIP, words=("activation_checkpointing=full",)),
        Case(2, "keys", optimizer="adamw", documents=True),
        Case(2, "heads", documents=True, words=HYBRID),
    ],
}


def off(ranks: int, cases: list[Case], folder: Path) -> dict[Case, dict[str, float]]:
    """The cases that are not equal to the plain loop."""
    found = spawn(ranks, run_cases, folder, ranks, cases, timeout_seconds=400)[0]
    numbers = {case: deviations(case, result) for case, result in zip(cases, found, strict=True)}
    print("NUMBERS", *numbers.items(), sep="\n")
    return {case: found for case, found in numbers.items() if max(found.values()) > BOUNDS[case.precision]}


def test_parts_of_sequences_equal_the_plain_loop_by_heads_and_by_keys(tmp_path: Path) -> None:
    """The short form of what follows."""
    assert not off(2, CASES[2][:4], tmp_path)


@pytest.mark.parametrize("ranks", CASES)
def test_parts_of_sequences_equal_the_plain_loop(ranks: int, tmp_path: Path) -> None:
    assert not off(ranks, CASES[ranks], tmp_path)


def run_without_masks(folder: Path, ranks: int, cases: list[Case]) -> tuple[list[dict[str, Any]], int, list[str]]:
    """In each rank, with the kernels of a GPU; how often there were more keys than queries, and what ran."""
    with as_on_a_gpu():
        found = run_cases(folder, ranks, cases)
    return found, calls["more keys"], kernels_that_ran()["whole sequences"]


WITHOUT_MASKS = {
    2: [
        Case(2, "keys", accumulate=2, clip=CLIP),
        Case(2, "keys", length=14),
        Case(2, "keys", "fp32", words=("compile=layer",)),
    ],
    4: [Case(4, "keys", optimizer="adamw", words=("activation_checkpointing=full",))],
}


@pytest.mark.parametrize("ranks", WITHOUT_MASKS)
def test_by_keys_no_mask_is_made_where_a_kernel_needs_none(ranks: int, tmp_path: Path) -> None:
    """Each run of positions with the keys up to its end: the plain loop's numbers, to the last digits of fp64."""
    cases = WITHOUT_MASKS[ranks]
    ran = spawn(ranks, run_without_masks, tmp_path, ranks, cases)
    found, more_keys, kernels = ran[0]
    for case, result in zip(cases, found, strict=True):
        numbers = deviations(case, result)
        print("NUMBERS", case, numbers)
        assert max(numbers.values()) <= (1e-12 if case.precision == "fp64" else BOUNDS["fp32"]), (case, numbers)
    assert more_keys > 0 and kernels == ["flash"]


def stop_and_resume(folder: Path) -> dict[str, dict[str, Any]]:
    """In each rank: without a stop; up to a checkpoint and on from it; and on from it without dividing sequences."""
    case = Case(2, "keys", optimizer="adamw", accumulate=2, clip=CLIP)
    words = ("checkpoint.save_every_n_steps=2", "checkpoint.save_at_end=false")
    found = {"straight": fit(plan_of(case, folder / "straight", 2, *words))}
    fit(plan_of(case, folder / "stopped", 2, *words, "max_steps=2"))
    resume = f"resume={checkpoint_path(folder / 'stopped', 2)}"
    found["resumed"] = fit(plan_of(case, folder / "stopped", 2, *words, resume))
    whole = Case(1, "keys", optimizer="adamw", accumulate=2, clip=CLIP)
    found["whole"] = fit(plan_of(whole, folder / "whole", 2, *words, resume, "checkpoint=none"))
    return found


def test_a_resumed_run_never_stopped_and_a_checkpoint_goes_on_with_whole_sequences(tmp_path: Path) -> None:
    found = spawn(2, stop_and_resume, tmp_path)[0]
    straight, resumed, whole = found["straight"], found["resumed"], found["whole"]
    assert resumed["losses"] == straight["losses"] and resumed["norms"] == straight["norms"]
    assert all(torch.equal(resumed["final"][name], tensor) for name, tensor in straight["final"].items())
    assert whole["losses"] == pytest.approx(straight["losses"][2:], rel=1e-9)
    assert whole["norms"] == pytest.approx(straight["norms"][2:], rel=1e-9)


def broken_runs(folder: Path, breaks: list[str]) -> list[dict[str, Any]]:
    """In each rank: the same case with one fault after the other."""
    right_layout, right_masks = ContextParallel.layout, ContextParallel._masks
    case, found = Case(2, "keys"), []

    def from_zero(self: Any, positions: Any, documents: Any, **more: Any) -> Any:
        layout = right_layout(self, positions, documents, **more)
        return layout | {"positions": torch.arange(len(layout["positions"]))}

    def in_sequence(self: Any, *arguments: Any) -> Any:
        return [torch.roll(mask, 1, dims=2) for mask in right_masks(self, *arguments)]

    def without_context(self: Topology) -> int:
        return self.data_parallel_size

    faults: dict[str, Any] = {
        "rotary positions from 0": patch.object(ContextParallel, "layout", from_zero),
        "masks in another order": patch.object(ContextParallel, "_masks", in_sequence),
        "divisor without context": patch.object(Topology, "loss_size", property(without_context)),
    }
    for name in breaks:
        with faults[name]:
            found.append(fit(plan_of(case, folder / name.replace(" ", "-"), 2, "checkpoint=none")))
    return found


def test_what_is_broken_on_purpose_is_seen(tmp_path: Path) -> None:
    breaks = ["rotary positions from 0", "masks in another order", "divisor without context"]
    found = spawn(2, broken_runs, tmp_path, breaks)[0]
    for name, result in zip(breaks, found, strict=True):
        numbers = deviations(Case(2, "keys"), result)
        assert max(numbers.values()) > 1e-3, f"{name}: {numbers}"


def test_the_example_of_recipes_readme(tmp_path: Path) -> None:
    expected = spawn(1, context_example.run, tmp_path / "one", 1, [])[0]
    for method in ("heads", "keys"):
        words = ["strategy.context_parallel_size=2", f"strategy.context_parallel_method={method}"]
        found = spawn(2, context_example.run, tmp_path / method, 2, words)[0]
        assert len(found) == 3 and found == pytest.approx(expected, rel=1e-12), method
