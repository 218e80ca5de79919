"""Where a run's checkpoints are, and which one to go on from. No torch: the launcher asks before anything starts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError

FORMAT = 2
_READS = (1, 2)  # in 1, everything but tensors by name was what torch.load reads by itself: see plain.py
MANIFEST = "manifest.json"  # the last file to be written: a folder without it is no checkpoint

_STEP = re.compile(r"step-\d{8}\.ckpt")


def checkpoint_path(run_dir: str | Path, step: int) -> Path:
    return Path(run_dir) / "checkpoints" / f"step-{step:08d}.ckpt"


def unsafe_file(path: Path) -> Path:
    """Beside a file of a checkpoint: what only a pickle can hold, for those who trust whoever wrote it."""
    return path.with_suffix(".unsafe.pkl")


def stage_file(name: str, stage: str) -> str:
    """`plan.json` → `plan-validate.json`: looking at a run leaves the record of how it was trained."""
    return name if stage == "fit" else f"-{stage}.".join(name.rsplit(".", 1))


def keep_earlier(path: Path, text: str) -> Path | None:
    """What a run was started with stays beside what it goes on with: `plan.json` → `plan-1.json`, the oldest first.

    Returns:
        Where it is now, if it had to go.
    """
    if "-" in path.stem or not path.exists() or path.read_text() in ("", text):
        return None
    number = 1
    while (kept := path.with_stem(f"{path.stem}-{number}")).exists():
        number += 1
    path.rename(kept)
    return kept


def list_checkpoints(run_dir: str | Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    folder = Path(run_dir) / "checkpoints"
    found = [p for p in folder.iterdir() if _STEP.fullmatch(p.name)] if folder.is_dir() else []
    return sorted(p for p in found if (p / MANIFEST).is_file())


def damage(checkpoint: Path) -> str | None:
    """What a look at names and sizes finds wrong. Checksums take longer: see load.py."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        for name, file in manifest["files"].items():
            path = checkpoint / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != file["bytes"]:
                return f"{name} has {path.stat().st_size} bytes of {file['bytes']}"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    if manifest.get("format") not in _READS:
        reads = " and ".join(map(str, _READS))
        return f"{MANIFEST} is of format {manifest.get('format')}, and this version reads {reads}"
    return None


def newest_whole(run_dir: str | Path) -> Path | None:
    """As far as names and sizes tell."""
    return next((path for path in reversed(list_checkpoints(run_dir)) if damage(path) is None), None)


def best_whole(run_dir: str | Path) -> Path | None:
    """The checkpoint with the best score, as far as names and sizes tell; None: no score was kept, or it is damaged."""
    folder = Path(run_dir) / "checkpoints"
    try:
        path = folder / Path(json.loads((folder / "best.json").read_text())["checkpoint"]).name
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return path if damage(path) is None else None


def trained_mark(run_dir: str | Path) -> Path:
    """A file that is there as soon as the first step has been made."""
    return Path(run_dir) / "logs" / "trained"


def was_trained(run_dir: str | Path) -> bool:
    """Whether a run has left anything that a new start of its name would spoil: a step that was made, a checkpoint, a
    row of measurements, a summary. A start that was refused or crashed before its first step has not."""
    folder = Path(run_dir)
    checkpoints = folder / "checkpoints"
    if (
        trained_mark(folder).exists()
        or (folder / "summary.json").exists()
        or (checkpoints.is_dir() and any(checkpoints.iterdir()))
    ):
        return True
    try:
        with (folder / "metrics.csv").open() as file:
            return sum(1 for _ in zip(range(2), file, strict=False)) == 2  # the names of its columns, and a row
    except FileNotFoundError:
        return False


def resolve_resume(resume: str | None, run_dir: str | Path, stage: str, may_be_taken: bool = True) -> str | None:
    """`resume=` as written → the checkpoint to load, or None. `may_be_taken`: look whether another run is there.

    Raises:
        ConfigError: no such checkpoint, or a run directory that would be overwritten.
    """
    try:
        taken = may_be_taken and stage == "fit" and (Path(run_dir) / "plan.json").exists() and was_trained(run_dir)
        if resume == "best" and stage == "fit":
            raise ConfigError(
                f"resume=best: a run goes on from its newest checkpoint, with resume=auto; to train on from its best "
                f"one ({best_whole(run_dir) or 'there is none here'}), give resume=PATH and another name="
            )
        if resume in ("auto", "best"):
            found = (best_whole(run_dir) if resume == "best" else None) or newest_whole(run_dir)
            if found is None and list_checkpoints(run_dir):
                last = list_checkpoints(run_dir)[-1]
                raise ConfigError(
                    f"resume={resume}: no checkpoint of {run_dir} is whole ({last.name}: {damage(last)}); another "
                    f"name= starts anew"
                )
            if found is None and stage != "fit":
                raise ConfigError(
                    f"resume={resume}: {run_dir} holds no checkpoint to {stage}; name= a run that has one"
                )
            return str(found) if found else None
        path = None if resume is None else _checkpoint(resume)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"cannot look for checkpoints of {run_dir}: {error}; give another path") from None
    if taken and (path is None or Path(run_dir).resolve() not in path.parents):
        raise ConfigError(f"{run_dir} already holds a run: resume=auto goes on with it, another name= starts a new one")
    if taken and path and (newer := [p.name for p in list_checkpoints(run_dir) if step_of(p) > step_of(path)]):
        raise ConfigError(
            f"resume={resume}: this run went on to {newer[-1]}, and two histories would mix in {run_dir}: "
            f"another name= starts a branch"
        )
    return None if path is None else str(path)


def step_of(path: str | Path) -> int:
    """Of `step-…` and `best-…`; -1 for a checkpoint of another name."""
    match = re.fullmatch(r"(?:step|best)-(\d{8})\.ckpt", Path(path).name)
    return int(match[1]) if match else -1


def stopped_before(run_dir: str | Path, step: int) -> dict[str, Any] | None:
    """What stopped this run early at `step`, as its summary has it; None where nothing did."""
    try:
        stop = json.loads((Path(run_dir) / "summary.json").read_text()).get("stopped_early")
    except (OSError, ValueError):
        return None
    return stop if stop and stop["step"] == step else None


def _checkpoint(resume: str) -> Path:
    path = Path(resume).expanduser().resolve()
    if not path.exists():
        raise ConfigError(f"resume={resume}: no such checkpoint; resume=auto takes the newest of this name")
    if not (path / MANIFEST).is_file():
        raise ConfigError(
            f"resume={resume}: without a {MANIFEST} it is no complete checkpoint; give another, or resume=auto"
        )
    if found := damage(path):
        raise ConfigError(f"resume={resume} is damaged: {found}; resume=auto takes the newest that is whole")
    return path
