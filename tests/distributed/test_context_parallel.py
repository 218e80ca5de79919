"""`strategy.context_parallel_size=` changes memory and no number: each rank computes a part of every sequence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.context import BOUNDS, CLIP, Case, deviations, run_cases
from tests.harness.processes import spawn

HYBRID = ("strategy=fsdp_hybrid", "strategy.shard_size=1")
CASES = {
    2: [
        Case(2, "heads", "fp32", "adamw", accumulate=2, clip=CLIP),
        Case(2, "heads", documents=True),
        Case(2, "keys", optimizer="adamw", accumulate=4, clip=CLIP),
        Case(2, "keys", documents=True, words=("activation_checkpointing=full",)),
        Case(2, "keys", length=14),  # runs of equal length from both ends do not fit
        Case(2, "heads", "fp32", words=("compile=layer", "activation_checkpointing=full")),
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
