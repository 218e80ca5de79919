"""docs/large-models.md: what the ranks of a host hold of its memory while a model is made, and while it is read."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.results import read
from benchmarks.pages.markdown import device_of, table, torch_and_commit

COLUMNS = ["", "while made, GB a rank", "while read, GB a rank", "of files, GB a rank", "while made, GB of all ranks"]


def host_memory() -> list[str]:
    """results/host-memory-*.json: the peaks of each strategy, beside the size of the model."""
    lines: list[str] = []
    for result in read("host-memory"):
        whole = max((row["whole_bytes"] for row in result["rows"]), default=0)
        lines += [
            f"{result['ranks']} ranks, {device_of(result, 'CPU', default='cuda')}, "
            f"{torch_and_commit(result['environment'])}. `{result['command']}`: {whole / 4e9:.2f}e9 parameters, "
            f"{whole / 1e9:.1f} GB in fp32, and safetensors of {result['settings']['file_bytes'] / 1e9:.1f} GB.",
            "",
            *table(COLUMNS, map(_row, result["rows"])),
            "",
        ]
    return lines


def _row(row: dict[str, Any]) -> list[str]:
    made, read = ([rank["own"] for rank in row[how]] for how in ("made", "read"))
    return [
        f"`{row['strategy']}`",
        f"{max(made) / 1e9:.2f} ({max(made) / row['whole_bytes']:.0%})",
        f"{max(read) / 1e9:.2f} ({max(read) / row['whole_bytes']:.0%})",
        f"{max(rank['mapped'] for rank in row['read']) / 1e9:.2f}",
        f"{sum(made) / 1e9:.2f}",
    ]


TABLES = {"host_memory": host_memory}
