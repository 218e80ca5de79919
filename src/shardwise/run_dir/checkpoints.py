"""Lists a run's checkpoints and finds the newest undamaged one. No torch: the launcher asks before ranks start."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.run_dir.files import (
    BEST,
    CHECKPOINTS,
    DAMAGED,
    MANIFEST,
    METRICS,
    MOST_BYTES,
    PARTIAL,
    PLAN,
    SUMMARY,
    inside,
    open_regular,
    read_json,
    read_text,
    trained_mark,
    write_whole,
)

FORMAT = 2
# Formats that this version reads. Format 1 holds only values that torch.load reads without checkpoint/encoding.py.
_READS = (1, 2)

_STEP = re.compile(r"step-\d{8}\.ckpt")


def list_checkpoints(run_dir: str | Path) -> list[Path]:
    """What has a checkpoint's name in a run, oldest first: `damage` says whether it is one."""
    folder = Path(run_dir) / CHECKPOINTS
    found = [p for p in folder.iterdir() if _STEP.fullmatch(p.name)] if folder.is_dir() else []
    return sorted(found)


_ASIDE = ".old" + PARTIAL


def aside_path(checkpoint: Path) -> Path:
    """Where a checkpoint is while another one gets its name: a folder with content cannot be replaced at once."""
    return checkpoint.with_name(checkpoint.name + _ASIDE)


def give_name_again(run_dir: str | Path) -> None:
    """Give a checkpoint its name again, if the process that was replacing it was killed before the new one had it."""
    for aside in (Path(run_dir) / CHECKPOINTS).glob(f"*{_ASIDE}"):
        named = aside.with_name(aside.name.removesuffix(_ASIDE))
        if not named.exists():
            aside.rename(named)


def damage(checkpoint: Path) -> str | None:
    """Say what is wrong with the names and sizes of a checkpoint's files; None: nothing is.

    Checksums take longer: see checkpoint/files.py, which notes what it has found.
    """
    try:
        if (checkpoint / DAMAGED).is_file():
            return read_text(checkpoint / DAMAGED).strip() or f"{DAMAGED} says so"
        manifest = read_json(checkpoint / MANIFEST)
        for name, file in manifest["files"].items():
            path = inside(checkpoint, name)
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != file["bytes"]:
                return f"{name} has {path.stat().st_size} bytes, and {MANIFEST} says {file['bytes']}"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({_reason(error)})"
    if manifest.get("format") not in _READS:
        reads = " and ".join(map(str, _READS))
        return f"{MANIFEST} is of format {manifest.get('format')}, and this version reads {reads}"
    return None


def _reason(error: Exception) -> str:
    """Why a file could not be read: in words where the file is not what it should be."""
    known = isinstance(error, OSError) and error.strerror
    return str(known or (error if type(error) is ValueError else type(error).__name__))


def best_in(folder: Path, best: Any) -> Path:
    """The checkpoint that `best.json` names, in its own folder: what it names is removed when a better one comes.

    Raises:
        ValueError, LookupError, TypeError: it names none that a run has written there.
    """
    name = best["checkpoint"]
    path = inside(folder, name)
    if path.name != name or step_of(path) < 0:
        raise ValueError(f"{name!r} is no checkpoint's name")
    return path


def mark_damaged(checkpoint: Path, found: str) -> None:
    """Note what checksums have found, so that the checkpoint counts as none of those that are kept."""
    with suppress(OSError):  # a folder that may only be read is not counted by anybody
        write_whole(checkpoint / DAMAGED, f"{found}; {DAMAGED} beside it says so\n")


def another_than(checkpoint: Path) -> str:
    """What to give in place of a checkpoint that cannot be read."""
    whole = newest_whole(checkpoint.parents[1]) if checkpoint.parent.name == CHECKPOINTS else None
    return "give another" if whole in (None, checkpoint) else f"the newest whole one of that run is {whole}"


def none_is_whole(run_dir: str | Path, known: Mapping[str, str] | None = None) -> str:
    """What is wrong with each checkpoint, the newest first. `known`: what reading has found, by checkpoints' names."""
    paths = reversed(list_checkpoints(run_dir))
    each = [f"{path.name}: {found}" for path in paths if (found := (known or {}).get(path.name) or damage(path))]
    return f"no checkpoint of {run_dir} is whole ({'; '.join(each)}); another name= starts anew"


def newest_whole(run_dir: str | Path) -> Path | None:
    """The newest checkpoint that is whole, as far as names and sizes tell; None: there is none."""
    return next((path for path in reversed(list_checkpoints(run_dir)) if damage(path) is None), None)


def best_whole(run_dir: str | Path) -> Path | None:
    """The checkpoint with the best score, as far as names and sizes tell; None: no score was kept, or it is damaged."""
    folder = Path(run_dir) / CHECKPOINTS
    try:
        path = best_in(folder, read_json(folder / BEST))
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return path if damage(path) is None else None


def named_checkpoint(given: str) -> tuple[Path, list[str]]:
    """A run's newest checkpoint that is whole, or the checkpoint that is named, and which newer ones are damaged.

    Raises:
        ConfigError: there is neither.
    """
    path = Path(given).expanduser().absolute()
    if not path.exists():
        raise ConfigError(f"{given}: there is no such run or checkpoint; give runs/<id>, or a step-….ckpt in it")
    if (path / MANIFEST).is_file():
        if found := damage(path):
            raise ConfigError(f"{given} is damaged: {found}; give another checkpoint")
        return path, []
    newest, all_checkpoints = newest_whole(path), list_checkpoints(path)
    if newest is None:
        why = f"neither a {MANIFEST} nor checkpoints"
        if all_checkpoints:
            why = "; ".join(f"{one.name} is damaged: {damage(one)}" for one in reversed(all_checkpoints))
        raise ConfigError(f"{given} holds no whole checkpoint: {why}; give runs/<id>, or a step-….ckpt in it")
    passed = [one for one in all_checkpoints if one.name > newest.name]  # a run may have removed the newest by now
    return newest, [f"{one.name} is damaged: {damage(one)}" for one in reversed(passed)]


def run_of(checkpoint: Path) -> Path:
    """The folder of the checkpoint's run; of a checkpoint that lies elsewhere, the folder that it lies in."""
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else checkpoint.parent


def module_node(checkpoint: Path) -> dict[str, Any]:
    """The module's part of the Plan that the checkpoint was trained with, from its own copy or from its run's.

    Raises:
        ConfigError: neither is there.
    """
    paths = [checkpoint / PLAN, run_of(checkpoint) / PLAN]
    try:
        path = next((path for path in paths if path.is_file()), paths[1])
        node = read_json(path)["module"]
        {"_target_": node["_target_"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{path} has to say which module it was ({type(error).__name__}): give the checkpoint in its run's folder"
        ) from None
    return dict(node)


def was_trained(run_dir: str | Path) -> bool:
    """Whether a run has left anything that a new run of its name would spoil.

    That is a step that was made, a checkpoint, a row of metrics.csv or a summary. A start that was refused, or crashed
    before its first step, has left none of them.
    """
    folder = Path(run_dir)
    checkpoints = folder / CHECKPOINTS
    if (
        trained_mark(folder).exists()
        or (folder / SUMMARY).exists()
        or (checkpoints.is_dir() and any(checkpoints.iterdir()))
    ):
        return True
    try:
        with open_regular(folder / METRICS) as file:
            return file.readline(MOST_BYTES) != b"" != file.readline(1)  # the header, and a row
    except FileNotFoundError:
        return False


def step_of(path: str | Path) -> int:
    """The step in the names `step-…` and `best-…`; -1 for a checkpoint of another name."""
    match = re.fullmatch(r"(?:step|best)-(\d{8})\.ckpt", Path(path).name)
    return int(match[1]) if match else -1


def stopped_before(run_dir: str | Path, step: int) -> dict[str, Any] | None:
    """What stopped this run early at `step`, from its summary; None: nothing did."""
    try:
        stop = read_json(Path(run_dir) / SUMMARY).get("stopped_early")
    except (OSError, ValueError, AttributeError):
        return None
    return stop if stop and stop["step"] == step else None
