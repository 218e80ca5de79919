"""Records what happens in a run, what started it and on what it runs; keys and passwords are left out."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.config.secrets import SECRET_IN_TEXT, environment_secrets, is_secret
from shardwise.plan.hardware import installed
from shardwise.run_dir.files import EVENTS, parse_json, read_text, write_whole

# Records what happens in a run in `events.jsonl`, a line each: starts, saves, verdicts, the end.


@dataclass(frozen=True)
class Event:
    """Something that happened in a run."""

    time: float  # seconds since 1970
    kind: str  # "start", "save", "verdict", "profile", "end", …
    step: int | None  # the step that the run had made; None: not known
    text: str  # a sentence for the user
    data: dict[str, Any] = field(default_factory=dict)


def append_event(run_dir: str | Path, kind: str, step: int | None, text: str, **data: Any) -> None:
    """Append an event. A full disk does not end the run, and what it takes of an event spoils no other one.

    Rank 0 or its launcher calls this; and the rank whose GPU reports an error, which may not live to tell rank 0.
    """
    line = (
        json.dumps({"time": round(time.time(), 3), "kind": kind, "step": step, "text": redact_text(text), "data": data})
        + "\n"
    )
    try:
        descriptor = os.open(Path(run_dir) / EVENTS, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            end = os.lseek(descriptor, 0, os.SEEK_END)
            is_torn = end > 0 and os.pread(descriptor, 1, end - 1) != b"\n"
            rest = b"\n" * is_torn + line.encode()
            while rest:  # in one call, which a kill cannot cut in two; a disk that is nearly full may take a part
                rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)
    except OSError as error:
        sys.stderr.write(f"shardwise: {Path(run_dir) / EVENTS} could not be written: {error.strerror}\n")


def read_events(run_dir: str | Path) -> list[Event]:
    """The events of a run, the oldest first; none where there is no file, or none that can be read, which is said.

    Lines that are damaged are left out.
    """
    try:
        lines = read_text(Path(run_dir) / EVENTS).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        sys.stderr.write(f"shardwise: {error.filename} is not read: {error.strerror}\n")
        return []
    return [event for line in lines if (event := _parse(line)) is not None]


def _parse(line: str) -> Event | None:
    try:
        event = Event(**parse_json(line))
    except (ValueError, TypeError):
        return None
    return event if _is_sound(event) else None


def _is_sound(event: Event) -> bool:
    """Whether everything is what it should be, and the time one that a calendar has."""
    typed = isinstance(event.kind, str) and isinstance(event.text, str) and isinstance(event.data, dict)
    timed = isinstance(event.time, (int, float)) and 0 <= event.time < 1e11
    return typed and timed and isinstance(event.step, (int, type(None)))


# Writes files that tell a Slurm job's batch script what happened. No torch.


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


# Records the command that started a run, and on which machine, so that it can be given again.


def record_command(run_dir: str | Path, overrides: Sequence[str], *, launcher: str, alone: bool, locked: bool) -> None:
    """Append a "command" event. `overrides`: those of this run. `alone`: whether it is the command's only run.

    `locked`: whether this process has locked the run's folder. Secrets are left out: the file may be shown to others.
    """
    words = redact_words(["python", *sys.argv] if alone else ["python", sys.argv[0], *overrides])
    append_event(
        run_dir, "command", None, shlex.join(words), command=words, folder=os.getcwd(), launcher=launcher,
        locked=locked, machine=this_machine(), process=os.getpid(),
    )  # fmt: skip


def this_machine() -> dict[str, Any]:
    """What tells a machine, a boot of it and a container from others: their processes see each other's locks."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {"host": platform.node(), "boot": boot, "processes": os.readlink("/proc/self/ns/pid")}
    except OSError:
        return {"host": platform.node()}


# Describes what a run runs on: versions, commit, machine. It is recorded beside the run's config.

_PACKAGES = (
    "torch", "lightning", "torchmetrics", "hydra-core", "omegaconf", "numpy", "wandb", "triton", "flash-attn-4",
    "quack-kernels", "torchao", "deepspeed",
)  # fmt: skip


def describe_environment() -> dict[str, Any]:
    """Versions, commit and device names; None where something is absent. No secrets, no environment variables."""
    from shardwise import accelerator

    versions = accelerator.versions()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": platform.node(),
        "packages": {name: installed(name) for name in _PACKAGES},
        "cuda": versions["cuda"],
        "hip": versions["hip"],
        "nccl": versions["nccl"],
        "gpus": accelerator.device_names(),
        **describe_commit(),
    }


def describe_commit() -> dict[str, Any]:
    """The commit of the code that runs, and whether files differ from it."""
    commit = git("rev-parse", "HEAD")
    return {"commit": commit, "uncommitted_changes": bool(git("status", "--porcelain")) if commit else None}


def git(*arguments: str, folder: Path = Path(__file__).parent) -> str | None:
    """What git answers in `folder`; None: it fails, is not installed, or the folder is of no repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# Removes keys and passwords from what is written about a run.

# password=…, in the text of a message
_IN_TEXT = re.compile(
    r"(?i)((?:api_?key|access_?key|token|secret|password|passwd|pwd|passphrase)[\"']?\s*[=:]\s*)(?![\d\s]+\b)[^\s,;]+"
)
HIDDEN = "***"


def without_secrets(value: Any) -> Any:
    """`value`, in whose texts the keys and passwords of this process's environment are replaced by ***."""
    if isinstance(value, str):
        for secret in environment_secrets().values():
            value = value.replace(secret, HIDDEN)
        return value
    if isinstance(value, Mapping):
        return {key: without_secrets(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        kept = [without_secrets(item) for item in value]
        return kept if isinstance(value, list) or type(value) is not tuple else tuple(kept)
    return value


def _hide(found: re.Match[str]) -> str:
    return (found["name"] or found["scheme"] or "") + HIDDEN


def redact(value: Any, name: str = "") -> Any:
    """`value` without secrets: those of the environment, those under a name such as `api_key`, and those in addresses.

    For a page that others may see, and that may be written where the run's environment is not known.
    """
    if isinstance(value, Mapping):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(item, name) for item in value]
    if isinstance(value, str):
        return HIDDEN if value and is_secret(name) else SECRET_IN_TEXT.sub(_hide, without_secrets(value))
    return value


def redact_words(words: list[str]) -> list[str]:
    """A command line without secrets: the value of `loggers.flow.api_key=…` is hidden."""
    hidden = []
    for word in words:
        key, equals, value = word.partition("=")
        hidden.append(f"{key}={HIDDEN}" if equals and value and is_secret(key.lstrip("+-")) else redact(word))
    return hidden


def redact_text(text: str) -> str:
    """A message or a log without secrets."""
    return _IN_TEXT.sub(rf"\1{HIDDEN}", str(redact(text)))
