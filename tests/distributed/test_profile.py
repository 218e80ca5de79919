"""A profile of some steps: it changes no number of the run, and says what each phase of a step took."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from shardwise.run_dir.files import profile_folder, profile_trace
from tests.harness.cells import cell_plan, fit
from tests.harness.processes import spawn

WORDS = ["micro_batch_size=2", "global_batch_size=8", "max_steps=8", "deterministic=true"]
PROFILED = ["profile.start=4", "profile.steps=2", "profile.ranks=all", "validate_every_n_steps=4",
            "checkpoint.save_every_n_steps=5", "max_validation_batches=2"]  # fmt: skip


def annotations(trace: Path) -> list[tuple[str, float, float]]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sorted(
        ((e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "user_annotation"),
        key=lambda event: event[1],
    )


def both(folder: Path) -> dict[str, Any]:
    """Each strategy with a profile and without: losses, whether the weights are the same, what the traces have."""
    found = {}
    for strategy in ("ddp", "fsdp", "zero2"):
        words = [*WORDS, *PROFILED[3:], f"strategy={strategy}"]
        plain = fit(cell_plan(folder / f"{strategy}-plain", 2, *words))
        with redirect_stdout(StringIO()) as said:
            run = fit(cell_plan(folder / strategy, 2, *words, *PROFILED[:3]))
        found[strategy] = {
            "losses": (plain["losses"], run["losses"]),
            "weights": all(torch.equal(value, run["final"][name]) for name, value in plain["final"].items()),
            "said": said.getvalue(),
        }
    return found


def test_a_profile_changes_no_bit_and_names_every_phase(tmp_path: Path) -> None:
    rank_0, _ = spawn(2, both, tmp_path)
    for strategy, found in rank_0.items():
        assert found["weights"] and found["losses"][0] == found["losses"][1] and len(found["losses"][0]) == 8
        folder = profile_folder(tmp_path / strategy, 4)
        for rank in range(2):
            check_annotations(annotations(profile_trace(folder, rank)))
        assert not list(folder.glob("*.partial"))
        with (tmp_path / strategy / "metrics.csv").open() as file:
            rows = {int(row["step"]): row for row in csv.DictReader(file) if row["train/loss"]}
        unmeasured = {step for step, row in rows.items() if not row["train/step_seconds"]}
        assert unmeasured == {step for step, row in rows.items() if not row["train/data_wait"]} == {3, 4, 5, 6}


def check_annotations(events: list[tuple[str, float, float]]) -> None:
    """Two steps of two micro-batches; in the first validation comes, and after the second a checkpoint is saved."""
    ours = [event for event in events if event[0].startswith(("ProfilerStep", "shardwise::"))]
    assert Counter(name for name, _, _ in ours) == {
        "ProfilerStep#4": 1, "ProfilerStep#5": 1, "shardwise::data": 5, "shardwise::forward": 4,
        "shardwise::backward": 4, "shardwise::optimizer": 2, "shardwise::save": 1, "shardwise::validation": 1,
    }  # fmt: skip
    steps = [event for event in ours if event[0].startswith("ProfilerStep")]
    phases = [event for event in ours if event[0].startswith("shardwise")]
    for name, begin, end in phases:
        assert any(first <= begin and end <= last for _, first, last in steps), name
    for (name, _, end), (other, begin, _) in itertools.pairwise(phases):
        assert end <= begin, f"{name} is not over when {other} begins"
