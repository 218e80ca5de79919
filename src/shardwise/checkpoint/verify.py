"""Whether a checkpoint is what was written."""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.checkpoint.files import io_threads, sha256_of
from shardwise.checkpoint.plain import unpack
from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.run_dir.checkpoints import damage, list_checkpoints
from shardwise.run_dir.files import MANIFEST, unsafe_file

_T = TypeVar("_T")


def verify_resume(plan: Plan) -> Plan:
    """The checkpoint to resume from, every byte of it looked at. Under resume=auto, else the newest whole one before.

    Collective: each rank reads its share of the files.

    Raises:
        ConfigError: the one that was named is damaged, or all are; says which file.
    """
    told = []
    plan = plan.going_on_from(_of_rank_zero(plan.resume))  # on a shared file system each sees its own
    while plan.resume is not None and (found := _damage(Path(plan.resume))):
        said = f"{plan.resume} is damaged: {found}"
        if not plan.may_fall_back:
            raise ConfigError(f"resume={said}; resume=auto takes the newest that is whole")
        before = _of_rank_zero([p for p in list_checkpoints(plan.run_dir) if p.name < Path(plan.resume).name])
        if not before:
            raise ConfigError(f"resume=auto: {said}, and there is none before it; another name= starts anew")
        told.append(f"{said}; going on from {before[-1].name}")
        plan = plan.going_on_from(str(before[-1]))
    if dist.get_rank() == 0:
        for line in told:
            print(line, flush=True)
    return plan


def _of_rank_zero(value: _T) -> _T:
    values: list[Any] = [value]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(values, src=0)
    found: _T = values[0]
    return found


def _damage(folder: Path) -> str | None:
    found = damage(folder) or changed(folder, dist.get_rank(), dist.get_world_size())
    if dist.get_world_size() == 1:
        return found
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return next((one for one in everywhere if one), None)


def changed(folder: Path, rank: int = 0, ranks: int = 1) -> str | None:
    """What the checksums of a rank's share of the files find wrong."""
    files = json.loads((folder / MANIFEST).read_text())["files"]

    def look(name: str) -> str | None:
        try:
            digest = sha256_of(folder / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        return None if digest == files[name]["sha256"] else f"{name} is not what was written (another checksum)"

    with ThreadPoolExecutor(io_threads()) as pool:
        return next(filter(None, pool.map(look, sorted(files)[rank::ranks])), None)


def load_rest(folder: Path, trust: bool = False) -> tuple[dict[str, Any], dict[str, str]]:
    """Everything but tensors by name; and which keys are missing, and of which class they are."""
    return _load(folder / "trainer.pt", trust)


def load_own(folder: Path, trust: bool = False) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """What this rank has written, if as many did; and which keys of it are missing."""
    about = json.loads((folder / MANIFEST).read_text())
    if about["ranks"] != dist.get_world_size():
        return None, {}
    return _load(folder / f"rank-{dist.get_rank():05d}.pt", trust)


def _load(path: Path, trust: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """`trust`: the pickle beside it may be read, and with it any code may run."""
    written = torch.load(path, map_location="cpu", weights_only=True)
    unsafe = unsafe_file(path)
    return unpack(written, pickle.loads(unsafe.read_bytes()) if trust and unsafe.exists() else None)
