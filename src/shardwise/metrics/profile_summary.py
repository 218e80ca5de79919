"""Reads the traces of a profile in a process of its own, so that no step of the run waits for it."""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from shardwise.errors import count
from shardwise.metrics.trace import ProfileSummary, draw, read_trace, summarize, summarize_ranks, table
from shardwise.run_dir.files import PROFILE_PICTURE, PROFILE_TABLE, SUMMARY, profile_trace, write_whole

_PATIENCE_SECONDS = 600  # in which every rank must have written its trace


def read_profile(folder: Path, ranks: list[int]) -> str:
    """Write summary.json, the table and the picture of a profile into its folder. Returns the table.

    Raises:
        FileNotFoundError: no rank's trace is there.
    """
    there = [rank for rank in ranks if profile_trace(folder, rank).exists()]
    if not there:
        raise FileNotFoundError(f"{folder} holds no trace")
    if len(there) == 1:
        summaries = [_summary(folder, there[0])]
    else:
        with ProcessPoolExecutor(min(len(there), max(1, (os.cpu_count() or 1) // 2), 8)) as pool:
            summaries = list(pool.map(_summary, [folder] * len(there), there))
    summary = summaries[0] if len(summaries) == 1 else summarize_ranks(summaries)
    write_whole(folder / SUMMARY, json.dumps(summary.to_json(), indent=2) + "\n")
    text = table(summary)
    if len(there) < len(ranks):
        text += f"\n{count(len(ranks) - len(there), 'rank')} wrote no trace: {sorted({*ranks} - {*there})}"
    write_whole(folder / PROFILE_TABLE, text + "\n")
    draw(summaries[0], read_trace(profile_trace(folder, there[0])), folder / PROFILE_PICTURE)
    return text


def _summary(folder: Path, rank: int) -> ProfileSummary:
    return summarize(read_trace(profile_trace(folder, rank)), rank=rank)


def main(words: list[str]) -> None:
    os.nice(10)
    folder, ranks = Path(words[0]), [int(word) for word in words[1:]]
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not all(profile_trace(folder, rank).exists() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.2)
    print(read_profile(folder, ranks))


if __name__ == "__main__":
    main(sys.argv[1:])
