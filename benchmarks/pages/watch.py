"""docs/watch.md: how large a long run's report is, and how long it takes."""

from __future__ import annotations

from benchmarks.harness.results import read
from benchmarks.pages.markdown import torch_and_commit


def report() -> list[str]:
    """results/report-*.json: one sentence for each."""
    return [
        f"A run of {one['steps']:,} logged steps and {one['ranks']} ranks with {one['numbers']} numbers of each has "
        f"a report of {one['report_bytes'] / 1e6:.2f} MB, from {one['metrics_bytes'] / 1e6:.0f} MB of `metrics.csv` "
        f"and {one['ranks_bytes'] / 1e6:.0f} MB of `ranks.csv`. It took {one['seconds']:.0f} s of one CPU core; "
        f"the first look of `shardwise watch` took {one['first_look_seconds']:.1f} s, and each later one "
        f"{one['next_look_seconds'] * 1000:.0f} ms (`{one['command']}`, {torch_and_commit(one['environment'])})."
        for one in read("report")
    ]


TABLES = {"report": report}
