"""Reads the traces of a profile in a process of its own, so that no step of the run waits for it."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from shardwise.errors import DataError, count
from shardwise.metrics.profile import (
    ProfileSummary,
    draw,
    read_trace,
    summarize,
    summarize_ranks,
    table,
)
from shardwise.run_dir.files import (
    PROFILE_PICTURE,
    PROFILE_RANKS,
    PROFILE_TABLE,
    SUMMARY,
    profile_trace,
    write_whole,
)

_PATIENCE_SECONDS = 600  # in which every rank must have written its trace


def read_profile(folder: Path, ranks: list[int]) -> str:
    """Write summaries, table and picture of a profile into its folder. Returns the table.

    `summary.json` and the picture are those of the lowest rank; `ranks.json` compares the ranks, if there are several.

    Raises:
        FileNotFoundError: no rank's trace is there.
        DataError: a trace is damaged.
    """
    there = [rank for rank in sorted(ranks) if profile_trace(folder, rank).exists()]
    if not there:
        raise FileNotFoundError(f"{folder} holds no trace")
    trace = read_trace(profile_trace(folder, there[0]))
    summaries = [summarize(trace, rank=there[0]), *_others(folder, there[1:])]
    write_whole(folder / SUMMARY, summaries[0].to_json())
    text = table(summaries[0]).rstrip("\n") + "\n"
    if len(there) > 1:
        compared = summarize_ranks(summaries)
        write_whole(folder / PROFILE_RANKS, compared.to_json())
        text += f"\n{compared.text}\n"
    if len(there) < len(ranks):
        missing = ", ".join(str(rank) for rank in ranks if rank not in there)
        text += f"\n{count(len(ranks) - len(there), 'rank')} wrote no trace: {missing}\n"
    write_whole(folder / PROFILE_TABLE, text)
    draw(summaries[0], trace, folder / PROFILE_PICTURE)
    return text


def _others(folder: Path, ranks: list[int]) -> list[ProfileSummary]:
    if not ranks:
        return []
    with ProcessPoolExecutor(min(len(ranks), max(1, (os.cpu_count() or 1) // 2), 8)) as pool:
        return list(pool.map(_summary, [folder] * len(ranks), ranks))


def _summary(folder: Path, rank: int) -> ProfileSummary:
    return summarize(read_trace(profile_trace(folder, rank)), rank=rank)


def main(words: list[str]) -> None:
    os.nice(10)
    folder, ranks = Path(words[0]), [int(word) for word in words[1:]]
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not all(profile_trace(folder, rank).exists() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.2)
    try:
        print(read_profile(folder, ranks), end="")
    except (DataError, FileNotFoundError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
