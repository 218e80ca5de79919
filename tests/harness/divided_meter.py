"""What the meter counts of a run in every layout of two ranks."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import patch

from shardwise.metrics.meter import Meter
from shardwise.plan import Plan
from tests.harness.cells import cell_plan, fit
from tests.harness.divided_stages import WORDS
from tests.harness.hugging_face import Run, plan_of

PEAK = 1e-6  # TFLOP/s, so that a CPU has a utilisation with digits


def counted_in(plan: Plan) -> list[tuple[float, float]]:
    """Fit; weight and FLOPs of each step as the meter adds them."""
    counted, add = list[tuple[float, float]](), Meter.add

    def note(self: Meter, step: Any, weight: float, flops: float) -> None:
        counted.append((weight, flops))
        add(self, step, weight, flops)

    with patch.object(Meter, "add", note):
        fit(plan)
    return counted


def run_hugging_face(folder: Path, ranks: int, layouts: dict[str, tuple[str, ...]]) -> dict[str, list[Any]]:
    """In each rank: the same of a model of Hugging Face, which says no FLOPs."""
    return {
        name: counted_in(plan_of(Run(layout), folder / name.replace(" ", "-"), ranks))
        for name, layout in layouts.items()
    }


def run_measured(folder: Path, ranks: int, layouts: dict[str, list[str]]) -> dict[str, Any]:
    """In each rank: weight and FLOPs of each step as the meter adds them, and the logged speeds of rank 0."""
    found = {}
    for number, (name, words) in enumerate(layouts.items()):
        plan = cell_plan(folder / str(number), ranks, *WORDS, *words, "max_steps=3")
        plan = dataclasses.replace(plan, peak_tflops=PEAK)
        counted = counted_in(plan)
        rows: list[dict[str, str]] = []
        if (path := Path(plan.run_dir) / "metrics.csv").exists():
            with path.open(newline="") as file:
                rows = [row for row in csv.DictReader(file) if row.get("train/mfu")]
        found[name] = {"counted": counted, "rows": rows}
    return found
