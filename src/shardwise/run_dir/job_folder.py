"""Writes files that tell a Slurm job's batch script what happened. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from shardwise.run_dir.files import write_whole
from shardwise.run_dir.reading import read_text


def job_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of the job that this process belongs to; None: no batch script of ours started it."""
    folder = environ.get("SHARDWISE_JOB_DIR")
    return Path(folder) if folder else None


def write_job_file(name: str, text: str) -> None:
    """Write a file for the batch script. Rank 0 calls this."""
    if (folder := job_folder()) is not None:
        with suppress(OSError):  # a broken file system makes itself known elsewhere
            write_whole(folder / name, text + "\n")


def has_begun(run_dir: str) -> bool:
    """Whether this job has started this run before: it was requeued, and goes on."""
    return run_dir in _begun()


def note_begun(run_dir: str, is_ours: bool = True) -> None:
    """Record that this job has started this run; or that it has not, since the run turns out to be another job's."""
    write_job_file("begun", "\n".join([*(before for before in _begun() if before != run_dir), *[run_dir] * is_ours]))


def _begun() -> list[str]:
    folder = job_folder()
    try:
        return [] if folder is None else read_text(folder / "begun").splitlines()
    except OSError:
        return []


def claim_exit_code(code: int, text: str) -> bool:
    """Record why a rank ends, in one line, for the batch script. Returns whether no other rank did so for this code."""
    folder = job_folder()
    if folder is None:
        return True
    lines = [line for line in text.splitlines() if line.strip()]
    # The last line of a traceback says what went wrong; of any other message the first line does
    is_traceback = code == 1 and lines and not lines[0].startswith("error: ")
    reason = (lines[-1] if is_traceback else lines[0]).removeprefix("shardwise: ") if lines else ""
    try:
        start = folder / f"start-{os.environ.get('SHARDWISE_START', '1')}"
        start.mkdir(parents=True, exist_ok=True)
        with (start / f"code-{code}").open("x") as file:
            file.write(reason + "\n")
    except FileExistsError:
        return False
    except OSError:
        pass
    return True
