"""docs/numerics.md: what strategies shard and which options they do not take, from plan/capabilities.py."""

from __future__ import annotations

import dataclasses

from benchmarks.pages.markdown import table
from shardwise.plan.capabilities import STRATEGIES, Capabilities


def strategies() -> list[str]:
    does = STRATEGIES.values()
    rows = [
        [f"{what}: each rank has a part", *("yes" if what in row.shards else None for row in does), None]
        for what in ("optimizer state", "gradients", "parameters")
    ]
    rows.append(
        ["tensor, context and pipeline axes", *("yes" if row.entry_of_pipeline else None for row in does), None]
    )
    for field in dataclasses.fields(Capabilities):
        if "words" in field.metadata:
            reasons = [getattr(row, field.name) for row in does]
            told = "<br>".join(dict.fromkeys(filter(None, reasons)))
            rows.append([field.metadata["words"], *("no" if reason else "yes" for reason in reasons), told])
    return table(["", *STRATEGIES, "what a run is told"], rows)


TABLES = {"strategies": strategies}
