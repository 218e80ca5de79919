"""A pipeline's checkpoints: resumed as it was started a run is the same to the bit; and weights come from elsewhere."""

from __future__ import annotations

from pathlib import Path

from tests.harness.pipeline_checkpoints import LAYOUTS, stop_and_resume
from tests.harness.processes import spawn


def test_a_resumed_run_never_stopped(tmp_path: Path) -> None:
    """With dropout, averages in buffers, a best checkpoint by a metric that the last stage measures, and a schedule
    that looks at it."""
    ranks = spawn(2, stop_and_resume, tmp_path, list(LAYOUTS))
    for layout in LAYOUTS:
        for rank in ranks:
            assert rank[layout]["unlike"] == [], layout
            straight, resumed = rank[layout]["validation"]
            assert straight == resumed and straight == ranks[0][layout]["validation"][0]
        kept, best = ranks[0][layout]["kept"], ranks[0][layout]["best"]
        assert kept[0] == kept[1] and any(name.startswith("best-") for name in kept[0]) and best[0] == best[1]
        assert len(set(ranks[0][layout]["rates"])) > 1, "the schedule must have looked at the metric"
