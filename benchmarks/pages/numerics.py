"""docs/numerics.md: what strategies shard and which options they do not take, from plan/capabilities.py."""

from __future__ import annotations

from benchmarks.pages.markdown import table
from shardwise.plan.capabilities import STRATEGIES

FEATURES = {  # a field of the table → what a user asks for
    "fp64": "`precision=fp64`",
    "fp16_on_cpu": "`precision=fp16` on the CPU",
    "fp8": "`precision=fp8`",
    "buckets_in_bf16": "options of gradient buckets with `precision=bf16`, without offload",
    "clip_by_value": "`gradient_clip_algorithm=value`",
    "compiled_step": "`compile=model`",
    "cuda_graphs": "`compile.cudagraphs=true`",
    "whole_rows": "`optimizer=muon`, `adamw_8bit`",
    "thawing": "`freeze_epochs=`",
    "manual_steps": "manual optimization, several optimizers",
    "complex_numbers": "parameters of complex numbers",
    "sync_errors": "`debug.sync=error`",
}


def strategies() -> list[str]:
    does = STRATEGIES.values()
    rows = [
        [f"{what}: each rank has a part", *("yes" if what in row.shards else None for row in does), None]
        for what in ("optimizer state", "gradients", "parameters")
    ]
    axes = ("yes" if row.entry_of_pipeline else None for row in does)
    rows.append(["tensor, context and pipeline axes", *axes, None])
    for field, words in FEATURES.items():
        reasons = [getattr(row, field) for row in does]
        told = "<br>".join(dict.fromkeys(filter(None, reasons)))
        rows.append([words, *("no" if reason else "yes" for reason in reasons), told])
    return table(["", *STRATEGIES, "what a run is told"], rows)


TABLES = {"strategies": strategies}
