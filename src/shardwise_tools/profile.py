"""Asks a run that is under way for a profile of its next steps: `shardwise profile runs/NAME`.

It reads traces too, in a process of its own (`main`), so that no step of the run waits for it.
"""

from __future__ import annotations

import os
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import ConfigError, DataError, count
from shardwise.run_dir.files import (
    PLAN,
    PROFILE_PICTURE,
    PROFILE_RANKS,
    PROFILE_REQUEST,
    PROFILE_TABLE,
    SUMMARY,
    is_locked,
    profile_trace,
    read_text,
    write_whole,
)
from shardwise.run_dir.profile_request import (
    MOST_STEPS,
    Answer,
    Request,
    read_answer,
    read_request,
    remove_request,
    write_request,
)
from shardwise_tools import read_words

if TYPE_CHECKING:
    from shardwise_tools.traces import ProfileSummary

HELP = f"""\
usage: shardwise profile RUN [steps=1] [ranks=0|all] [stacks=true] [wait_seconds=600]

Asks a run that is under way, on any node, for a profile of its next steps, and prints where their time went. RUN is the
run's folder, runs/NAME. The run's losses and weights stay the same to the bit. docs/profiling.md

  steps=N                   how many steps; at most {MOST_STEPS}
  ranks=0|all               rank 0, or every rank: what the ranks wait for each other shows with all
  stacks=true               names the line of Python behind each operation; the profiled steps become much slower
  wait_seconds=N            give up after this time; a run that validates or saves answers after that

RUN may also be a folder with traces (rank-0.json.gz): they are read anew.

`--steps 1`, `--ranks all` and `--stacks` are read too. What a run does from its start on: train.py … profile.start=N
"""

_ANSWER_SECONDS = 30.0  # in which the thread of rank 0 must have seen a request
_LOOK_SECONDS = 0.2
_PATIENCE_SECONDS = 600  # in which every rank must have written its trace


@dataclass
class Options:
    steps: int = 1
    ranks: str = "0"
    stacks: bool = False
    wait_seconds: float = 600.0


def run(words: list[str]) -> None:
    """Ask for a profile, wait for it, and print its table.

    Raises:
        ConfigError: there is no such run, or it has ended, does not answer, or could not be profiled.
    """
    alone, options = read_words(_plain(words), Options)
    if len(alone) != 1:
        raise ConfigError("shardwise profile takes the folder of one run: shardwise profile runs/NAME")
    if not 1 <= options.steps <= MOST_STEPS:
        raise ConfigError(f"steps={options.steps}: must be from 1 to {MOST_STEPS}; one is usually enough")
    if options.ranks not in ("0", "all"):
        raise ConfigError(f"ranks={options.ranks}: must be 0 or all; others are said at the start: profile.ranks=[3]")
    if not options.wait_seconds >= 1:
        raise ConfigError(f"wait_seconds={options.wait_seconds:g}: must be at least 1")
    run_dir = Path(alone[0])
    if not (run_dir / PLAN).is_file() and (ranks := ranks_in(run_dir)):
        print(read_profile(run_dir, ranks), end="")
        return
    _check_runs(run_dir)
    request = Request(options.steps, options.ranks == "all", options.stacks)
    if (other := read_request(run_dir)) is not None:
        age = max(0.0, time.time() - other.time)
        raise ConfigError(
            f"{run_dir}: somebody has asked for a profile {age:.0f} s ago, which is not done yet: wait for it, or "
            f"remove {run_dir / PROFILE_REQUEST}"
        )
    try:
        write_request(run_dir, request)
    except OSError as error:
        raise ConfigError(f"{run_dir} cannot be written to: {error.strerror}; ask as the user who runs it") from None
    try:
        folder = _wait(run_dir, request, options.wait_seconds)
    finally:
        remove_request(run_dir, request)
    print(read_text(folder / PROFILE_TABLE), end="")
    print(f"in {folder}: the traces, which https://ui.perfetto.dev opens, {SUMMARY} and a picture")


def ranks_in(folder: Path) -> list[int]:
    """The ranks that a folder has a trace of."""
    found = (re.fullmatch(r"rank-(\d+)\.json\.gz", path.name) for path in folder.glob("rank-*"))
    return sorted({int(name[1]) for name in found if name})


def _plain(words: list[str]) -> list[str]:
    """`--steps 1` and `--steps=1` → `steps=1`; `--stacks` → `stacks=true`."""
    plain: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--stacks" and rest[:1] not in (["true"], ["false"]):
            word = "stacks=true"
        elif word.startswith("--"):
            word = word[2:] if "=" in word else f"{word[2:]}={rest.pop(0) if rest else ''}"
        plain.append(word)
    return plain


def _check_runs(run_dir: Path) -> None:
    if not (run_dir / PLAN).is_file():
        raise ConfigError(f"{run_dir} is the folder of no run: give one such as runs/NAME, in which {PLAN} is")
    if is_locked(run_dir) is False:
        how = "has ended" if (run_dir / SUMMARY).exists() else "is not under way: it was stopped, or has died"
        raise ConfigError(f"the run in {run_dir} {how}; start it with profile.start=N to profile its step N")


def _wait(run_dir: Path, request: Request, seconds: float) -> Path:
    """The folder of the profile, as soon as it is read."""
    begin, shown = time.monotonic(), "asked"
    while True:
        answer = read_answer(run_dir, request)
        waited = time.monotonic() - begin
        if answer is not None and answer.state == "done":
            return Path(answer.text)
        if answer is not None and answer.state == "failed":
            raise ConfigError(f"{run_dir}: {answer.text}")
        if answer is None and waited > min(seconds, _ANSWER_SECONDS):
            raise ConfigError(
                f"the run in {run_dir} has not answered for {waited:.0f} s: it trains no step yet, was started by an "
                f"earlier version, or hangs; see its logs/"
            )
        if waited > seconds:
            raise ConfigError(
                f"no profile after wait_seconds={seconds:g}: the run {_state(answer)}; give it more, or look into "
                f"{run_dir} later"
            )
        _check_runs(run_dir)
        if answer is not None and answer.state != shown:
            shown = answer.state
            print(f"the run {_state(answer)}", flush=True)
        time.sleep(_LOOK_SECONDS)


def _state(answer: Answer | None) -> str:
    if answer is None:
        return "has not answered"
    return {"seen": "has seen the request", "begun": "is being profiled"}.get(answer.state, answer.state)


def read_profile(folder: Path, ranks: list[int]) -> str:
    """Write summaries, table and picture of a profile into its folder. Returns the table.

    `summary.json` and the picture are those of the lowest rank; `ranks.json` compares the ranks, if there are several.

    Raises:
        FileNotFoundError: no rank's trace is there.
        DataError: a trace is damaged.
    """
    from shardwise_tools.traces import draw, read_trace, summarize, summarize_ranks, table

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
    from shardwise_tools.traces import read_trace, summarize

    return summarize(read_trace(profile_trace(folder, rank)), rank=rank)


def main(words: list[str]) -> None:
    """Read the traces of a run in a process of its own: the folder, then the ranks whose traces are awaited."""
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
