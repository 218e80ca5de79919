"""Names a run's files, writes them whole or not at all, keeps earlier records, and locks the run's folder."""

from __future__ import annotations

import csv
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from shardwise.errors import ConfigError

# Written when a run starts
CONFIG = "config.yaml"  # what was asked for, all defaults included
PLAN = "plan.json"  # what was decided
ENVIRONMENT = "environment.json"  # versions, hardware and the state of the code
STARTS = "starts.json"  # when each process of the run was started
# Written while it runs
METRICS = "metrics.csv"  # a row a step
RANKS = "ranks.csv"  # a row a logged step and rank: what each rank measured
EVENTS = "events.jsonl"  # a line for everything that happened: starts, saves, verdicts, the end
GUARD = "guard.jsonl"  # a row for every step that the guard objected to, with its samples
PROMETHEUS = "metrics.prom"  # the last numbers, for Prometheus
PROMETHEUS_TARGETS = "prometheus-targets.json"  # where Prometheus can ask for them
ENERGY = "energy.json"  # what the GPUs have taken since the run's first start
WANDB_GONE = "wandb-gone"  # the first step that W&B has not got
# Written at its end
SUMMARY = "summary.json"  # what the run came to
LOSSES = "loss.png"  # its loss curves
REPORT = "report.html"  # a page about the run, also where it died
PREDICTIONS = "predictions.jsonl"  # a row a sample, of stage=predict
PREDICTIONS_TABLE = "predictions.csv"  # the same as a table
CLASSES = "classes_*.json"  # what each evaluation of a classifier says of its classes
LEARNING_RATES = "learning_rate.csv"  # the loss at every rate, of find_learning_rate=true
LEARNING_RATES_PICTURE = "learning_rate.png"
PROFILE_REQUEST = "profile-request.json"  # `shardwise profile` asks for a profile
PROFILE_ANSWER = "profile-answer.json"  # what the run has made of the last request
# In the folder of a profile, which has a summary.json too
PROFILE_TABLE = "profile.txt"
PROFILE_RANKS = "ranks.json"  # the ranks compared
PROFILE_PICTURE = "profile.png"
# Folders
LOGS = "logs"  # a file a rank
CHECKPOINTS = "checkpoints"
# In the folder of checkpoints
BEST = "best.json"  # which checkpoint has the best score
BEST_CHECKPOINTS = "best-*.ckpt"  # that one, and those that a killed process has not removed
# In a checkpoint
MANIFEST = "manifest.json"  # it is written last: a folder without it is no checkpoint
DAMAGED = "damaged.txt"  # a run that could not go on from it says why: names and sizes do not tell
TRAINER_STATE = "trainer.pt"  # everything but tensors by name, the same for all ranks
TENSORS = ".metadata"  # where the chunks of every tensor are; torch.distributed.checkpoint's name

PARTIAL = ".partial"  # ends the name of what is still being written


def partial_path(path: Path) -> Path:
    """Where a file or folder is written before it gets its name: `metrics.csv` → `metrics.csv.partial`."""
    return path.with_name(path.name + PARTIAL)


def sync(path: Path) -> None:
    """Sync a file's bytes, or the names in a folder, to disk. Some file systems cannot sync a folder: they need not.

    Raises:
        OSError: the disk, or the server, could not.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.EBADF, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """Sync the files of a folder that is to get its name, and the names in it. Raises OSError."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def put_in_place(path: Path, *, synced: bool = True) -> None:
    """Give what is `partial_path(path)` its name. `synced`: it outlives a loss of power. Raises OSError."""
    if synced:
        sync(partial_path(path))
    partial_path(path).replace(path)
    if synced:
        sync(path.parent)


def write_whole(path: Path, content: str | bytes, *, synced: bool = True) -> None:
    """The file has all of `content`, or what it had before. `synced`: also after a loss of power.

    Raises:
        OSError: it could not be written; nothing is left beside it.
    """
    try:
        partial_path(path).write_bytes(content if isinstance(content, bytes) else content.encode())
        put_in_place(path, synced=synced)
    except OSError as error:
        error.filename = error.filename or str(path)  # the system names no file where bytes find no room
        with suppress(OSError):
            partial_path(path).unlink(missing_ok=True)
        raise


def checkpoint_path(run_dir: str | Path, step: int) -> Path:
    return Path(run_dir) / CHECKPOINTS / f"step-{step:08d}.ckpt"


def tokenizer_folder(folder: str | Path) -> Path:
    """Where a run, or a checkpoint, keeps the files of the tokenizer that made its tokens."""
    return Path(folder) / "tokenizer"


def best_checkpoint_path(run_dir: str | Path, step: int) -> Path:
    """The checkpoint with the best score, under a name of its own."""
    return Path(run_dir) / CHECKPOINTS / f"best-{step:08d}.ckpt"


def rank_state(checkpoint: Path, rank: int) -> Path:
    """What one rank alone has to keep: random states, where its data are."""
    return checkpoint / f"rank-{rank:05d}.pt"


def unsafe_file(path: Path) -> Path:
    """The name of the pickle beside a checkpoint's file: it holds what is not plain data."""
    return path.with_suffix(".unsafe.pkl")


def check_folder(run_dir: str | Path) -> None:
    """Refuse a run's folder that cannot be made, since a file is where it or a folder above it would be.

    Raises:
        ConfigError
    """
    path = Path(run_dir)
    there = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not os.path.isdir(there):
        raise ConfigError(f"cannot write the run's folder {run_dir}: {there} is not a folder; give another runs_dir=")


def stage_file(name: str, stage: str) -> str:
    """`plan.json` → `plan-validate.json`: other stages than fit do not overwrite the records of training."""
    return name if stage == "fit" else f"-{stage}.".join(name.rsplit(".", 1))


def keep_earlier(path: Path, text: str) -> Path | None:
    """Rename an earlier record whose text differs. Returns the new path; None: nothing had to be renamed."""
    if "-" in path.stem or not path.exists() or path.read_text(errors="replace") in ("", text):
        return None
    return put_aside(path)


def put_aside(path: Path) -> Path:
    """Rename a file, and return its new path: `plan.json` → `plan-1.json`, `plan-2.json`, …, the oldest first."""
    number = 1
    while (kept := path.with_stem(f"{path.stem}-{number}")).exists():
        number += 1
    path.rename(kept)
    return kept


def put_back(path: Path, kept: Path) -> None:
    """Undo `keep_earlier`: the run was refused."""
    kept.replace(path)


def stage_results(run_dir: str | Path, stage: str) -> Path:
    """The path of what `stage=validate` or `stage=test` has measured."""
    return Path(run_dir) / f"{stage}.json"


def trained_mark(run_dir: str | Path) -> Path:
    """The path of a file that exists as soon as the first step has been made."""
    return Path(run_dir) / LOGS / "trained"


_locked: list[int] = []  # file descriptors that keep their locks for as long as this process lives
_LOCK_SECONDS = 120


def lock_run_dir(run_dir: Path, stage: str, *, is_requeued: bool) -> bool:
    """Lock a run's folder for as long as this process lives: one process trains it at a time.

    Returns:
        Whether it is locked. A file system without locks, and a stage other than fit, need none.

    Raises:
        ConfigError: another process holds the lock.
    """
    if stage != "fit":
        return False
    descriptor = os.open(run_dir, os.O_RDONLY)
    # When a requeued job starts, its last process may still be dying on another node, or a server may keep its lock
    deadline = time.monotonic() + (_LOCK_SECONDS if is_requeued else 0)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise ConfigError(
                    f"{run_dir} is being written by a run that is still alive: stop it, or give another name="
                ) from None
            time.sleep(0.5)
        except OSError:
            os.close(descriptor)
            return False
    _locked.append(descriptor)
    return True


def is_locked(run_dir: Path) -> bool | None:
    """Whether a process trains in a run's folder; None: its file system does not tell."""
    try:
        descriptor = os.open(run_dir, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def rank_log(run_dir: str | Path, rank: int) -> Path:
    """What one rank prints; of rank 0, which prints for the user, only what C libraries print."""
    return Path(run_dir) / LOGS / f"rank-{rank:05d}.log"


def rank_logs(run_dir: str | Path) -> list[Path]:
    """The logs of all ranks that have one."""
    return list((Path(run_dir) / LOGS).glob("rank-*.log"))


def hang_report(run_dir: str | Path, rank: int) -> Path:
    """Where a rank is that makes no progress, for the other ranks to read."""
    return Path(run_dir) / LOGS / f"hang-{rank:05d}.json"


def nccl_trace(run_dir: str | Path, rank: int | None = None) -> Path:
    """What NCCL's flight recorder has of a rank. None: the beginning of the name, to which NCCL adds the rank."""
    return Path(run_dir) / LOGS / f"nccl-trace-rank-{'' if rank is None else rank}"


def profile_summaries(run_dir: str | Path) -> list[Path]:
    """What was read from each profile of a run, the earliest first. Tables and pictures lie beside them."""
    return sorted((Path(run_dir) / "profile").glob(f"*/{SUMMARY}"))


def memory_snapshot(run_dir: str | Path, rank: int) -> Path:
    """What the allocator held on a rank that ran out of memory."""
    return Path(run_dir) / f"memory-rank{rank}.pickle"


def nccl_log(run_dir: str | Path, rank: int) -> Path:
    """What NCCL says on a rank, with debug.nccl."""
    return Path(run_dir) / LOGS / f"nccl-rank-{rank:05d}.log"


def profile_folder(run_dir: str | Path, step: int) -> Path:
    """Where the profile is whose first step is `step`."""
    return Path(run_dir) / "profile" / f"step-{step:06d}"


def profile_memory(folder: Path, rank: int) -> Path:
    """What held memory on a rank in the steps of a profile; a picture of the same name lies beside."""
    return folder / f"memory-rank-{rank}.json"


def profile_trace(folder: Path, rank: int) -> Path:
    """The trace of a rank in the folder of a profile."""
    return folder / f"rank-{rank}.json.gz"


# Reads files of a run's folder: whatever lies there, no reader waits for ever, fills the memory or leaves it.

MOST_BYTES = 2**28  # of a file that is read whole: the largest are the events of a long run
MOST_IN_LINE = 2**24  # bytes of one line: a sparse file is a line of zeros without an end


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read its bytes.

    Raises:
        OSError: it cannot be opened, or is a device or a named pipe, which could be read for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a named pipe would wait for its writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_whole(path: Path, last: int | None = None) -> bytes:
    """The content of a file, or its last bytes.

    Raises:
        OSError: it cannot be opened, is no regular file, or is too large to be what it should be.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if last is not None:
            file.seek(max(0, size - last))
        elif size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {MOST_BYTES:,} are read", str(path))
        return file.read(MOST_BYTES if last is None else last)


def read_text(path: Path) -> str:
    """The text of a file; bytes that are no UTF-8 are replaced. Raises OSError, as `read_whole` does."""
    return read_whole(path).decode(errors="replace")


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a file, which may be long; those before one that is longer than a line can be. Raises OSError."""
    with open_regular(path) as file:
        while 0 < len(line := file.readline(MOST_IN_LINE)) < MOST_IN_LINE:
            yield line.decode(errors="replace")


def parse_json(text: str | bytes) -> Any:
    """What a text in JSON says. Raises ValueError, also where it is nested deeper than Python can read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    """What a JSON file says. Raises OSError, as `read_whole` does, and ValueError, as `parse_json` does."""
    return parse_json(read_whole(path))


def inside(folder: Path, name: object) -> Path:
    """The path of a file in `folder` whose name was read from a file.

    Raises:
        ValueError: the name leads out of the folder, or is none.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise ValueError(f"{name!r} is no name of a file")
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        raise ValueError(f"{name!r} leads out of its folder")
    return folder / name


# Reads the rows of metrics.csv and ranks.csv.

T = TypeVar("T")
_NO_TEXT = "\ufffd"  # what Python reads in place of bytes that are no text


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of such a file, each with its step; none where there is no file.

    A last row that a kill cut short, and rows that are no text, are left out.
    """
    if not path.exists():
        return []
    whole = [line for n, line in enumerate(lines_of(path)) if line.endswith("\n") and (n == 0 or _NO_TEXT not in line)]
    return [row for row in readable(csv.DictReader(whole)) if (row.get("step") or "").isdigit()]


def keep_unless_goes_on(path: Path, step: int) -> None:
    """Put the rows of an earlier start aside, and say so, if a run from `step` on goes on with none of them."""
    if not path.exists():
        return
    has_steps = "step" in next(readable(csv.reader(lines_of(path))), [])
    why = "has no column named step" if not has_steps else "is of a start that left no checkpoint"
    if (step == 0 or not has_steps) and (kept := keep_earlier(path, "")) is not None:
        print(f"{path} {why}: a new one begins, and it is kept as {kept.name}", flush=True)


def readable(reader: Iterator[T]) -> Iterator[T]:
    """What a reader of the csv module finds, without the lines that are no csv.

    A power failure may leave thousands of zero bytes in a file, which the module takes for a field that is too long.
    """
    while True:
        try:
            yield from reader
            return
        except csv.Error:
            continue
