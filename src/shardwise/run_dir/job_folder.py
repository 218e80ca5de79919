"""The folder in which the processes of a Slurm job tell its batch script what happened. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from shardwise.run_dir.files import write_whole


def job_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Of the job that this process is a part of; None: no batch script of ours waits for it."""
    folder = environ.get("SHARDWISE_JOB_DIR")
    return Path(folder) if folder else None


def write_job_file(name: str, text: str) -> None:
    """For the batch script. For rank 0; a file system that fails here fails louder elsewhere."""
    if (folder := job_folder()) is not None:
        with suppress(OSError):
            write_whole(folder / name, text + "\n")


def has_begun(run_dir: str) -> bool:
    """Whether this job has been at this run before: it was requeued, and goes on."""
    return run_dir in _begun()


def note_begun(run_dir: str, is_ours: bool = True) -> None:
    """Of the runs that this job is at, one after the other, this is one; or it turns out to be somebody else's."""
    write_job_file("begun", "\n".join([*(before for before in _begun() if before != run_dir), *[run_dir] * is_ours]))


def _begun() -> list[str]:
    folder = job_folder()
    try:
        return [] if folder is None else (folder / "begun").read_text().splitlines()
    except OSError:
        return []


def claim_exit_code(code: int, text: str) -> bool:
    """Whether no other rank of the job has ended for the same reason; the batch script learns of it, in one line."""
    folder = job_folder()
    if folder is None:
        return True
    lines = [line for line in text.splitlines() if line.strip()]
    # Of a traceback the last line says what went wrong; everything else is one message, whose first line does
    is_traceback = code == 1 and lines and not lines[0].startswith("error: ")
    said = (lines[-1] if is_traceback else lines[0]).removeprefix("shardwise: ") if lines else ""
    try:
        start = folder / f"start-{os.environ.get('SHARDWISE_START', '1')}"
        start.mkdir(parents=True, exist_ok=True)
        with (start / f"code-{code}").open("x") as file:
            file.write(said + "\n")
    except FileExistsError:
        return False
    except OSError:
        pass
    return True
