"""What a module logs of parts of sequences is what it logs of whole ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.context import Case
from tests.harness.context_logs import run_logs
from tests.harness.pipelines import SIZE
from tests.harness.processes import spawn

CASES = {
    "by keys": (1, Case(2, "keys"), "LogsBehind"),
    "beside data ranks": (2, Case(2, "heads"), "Logs"),
    "in a pipeline": (1, Case(2, "keys", words=tuple(SIZE)), "Logs"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_logged_value_is_that_of_whole_sequences(tmp_path: Path, name: str) -> None:
    """On several data ranks it is of rank 0's samples, as Lightning has it."""
    data_ranks, case, module = CASES[name]
    ranks = 2 * data_ranks * (2 if case.words else 1)
    whole = spawn(data_ranks, run_logs, tmp_path / "whole", data_ranks, data_ranks, module, Case(1, "keys"))[0]
    parts = spawn(ranks, run_logs, tmp_path / "parts", ranks, data_ranks, module, case)[0]
    assert parts.keys() == whole.keys() and {"own/train/mean", "last own/validation/synced"} <= whole.keys()
    for key, values in whole.items():
        assert parts[key] == pytest.approx(values, rel=1e-9), key
