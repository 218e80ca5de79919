"""`attention=` under strategies: the same numbers, and a summary that says which kernel ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cells import cell_plan, fit
from tests.harness.processes import spawn

RUNS = {
    "auto": ["strategy=ddp"],
    "ddp": ["strategy=ddp", "attention=math"],
    "fsdp": ["strategy=fsdp", "attention=math", "activation_checkpointing=full"],
    "zero3": ["strategy=zero3", "attention=math"],
    "whole": ["strategy=fsdp", "attention=flash", "compile=model"],
}


def train_all(folder: Path) -> dict[str, Any]:
    from shardwise.nn import attention

    words, found = ["micro_batch_size=2", "global_batch_size=8", "max_steps=2"], {}
    for name, more in RUNS.items():
        attention._RAN.clear()  # of this process, which trains several runs
        plan = cell_plan(folder / name.replace(" ", "-"), 2, *words, *more)
        found[name] = fit(plan) | {"plan": plan.chosen_attention.name}
        summary = Path(plan.run_dir) / "summary.json"
        found[name]["ran"] = json.loads(summary.read_text())["attention"] if summary.exists() else None
    return found


def test_the_kernel_changes_no_number_and_stands_in_the_summary(tmp_path: Path) -> None:
    found = spawn(2, train_all, tmp_path)[0]
    for name, run in found.items():
        assert run["losses"] == pytest.approx(found["auto"]["losses"], rel=1e-6), name
        assert run["norms"] == pytest.approx(found["auto"]["norms"], rel=1e-5), name
    assert {name: run["plan"] for name, run in found.items()} == {
        "auto": "sdpa", "ddp": "math", "fsdp": "math", "zero3": "math", "whole": "flash",
    }  # fmt: skip
    for name, run in found.items():
        kernel = "flash" if name in ("auto", "whole") else "math"
        assert run["ran"] == {"whole sequences": [kernel]}, name
