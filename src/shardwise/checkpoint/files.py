"""Writes a checkpoint's files, and verifies that they are what was written."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.serialization import get_crc32_options, set_crc32_options

from shardwise.checkpoint.plain import unpack
from shardwise.devices import count_cpus
from shardwise.distributed.mesh import gather_objects
from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.run_dir.checkpoints import (
    another_than,
    damage,
    list_checkpoints,
    mark_damaged,
    named_checkpoint,
    none_is_whole,
)
from shardwise.run_dir.files import (
    CHECKPOINTS,
    MANIFEST,
    TRAINER_STATE,
    inside,
    open_regular,
    rank_state,
    read_json,
    unsafe_file,
)

# Writes and checks a checkpoint's files: at a pace that leaves the training room, with a checksum, synced to disk.

# Bytes that are written at a time. It is large, since beside a busy thread another waits long for the interpreter's
# lock, each time that it asks for it.
_PIECE = 2**24


class Pace:
    """Limits how many of a rank's threads write at a time: one beside the training, all when the training waits.

    Several threads slow down a step whose host is the bottleneck. Threads of another process do so just as much: they
    compete for the machine, not for the interpreter.
    """

    def __init__(self, beside_training: bool = False) -> None:
        self._turns = threading.Semaphore(1 if beside_training else io_threads())
        self._beside = beside_training

    def __enter__(self) -> None:
        self._turns.acquire()

    def __exit__(self, *args: object) -> None:
        self._turns.release()

    def hurry(self) -> None:
        """Let all threads write: the training waits from here on."""
        if self._beside:
            self._beside = False
            self._turns.release(io_threads())


class SummedFile(io.FileIO):
    """A file that computes its size and SHA-256 while it is written."""

    def __init__(self, path: str | os.PathLike[str], pace: Pace) -> None:
        super().__init__(path, "wb")
        self.pace, self.bytes, self.digest = pace, 0, hashlib.sha256()

    def write(self, content: Any) -> int:
        piece = memoryview(content)[:_PIECE]  # a buffered writer writes the rest in further calls
        with self.pace:
            many = super().write(piece)
            self.digest.update(piece[:many])
        self.bytes += many
        return many

    def close(self) -> None:
        try:
            if not self.closed:
                os.fsync(self.fileno())
        finally:
            super().close()


def io_threads() -> int:
    """The number of threads with which a rank writes, reads and checks files: from one to eight.

    It is a quarter of the rank's share of the machine's CPUs: two CPUs are often one core, and the training needs the
    rest.
    """
    share = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(8, share // 4, count_cpus() // 4))


def sha256_of(file: Path) -> str:
    digest, piece = hashlib.sha256(), memoryview(bytearray(min(_PIECE, file.stat().st_size + 1)))
    with open_regular(file) as content:
        while many := content.readinto(piece):
            digest.update(piece[:many])
    return digest.hexdigest()


def write_through(path: Path, content: bytes) -> None:
    """Write a file and sync it to disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def without_crc() -> Iterator[None]:
    """Keep torch.save from computing a CRC-32, which takes longer than writing; the manifest has a SHA-256."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


# Verifies that a checkpoint is what was written, and reads its parts that are not tensors by name.

_T = TypeVar("_T")
_CHANGED = " is not what was written (another checksum)"  # other damage may be that of a disk which answers later
_TRIES = 3  # of reading a run's newest checkpoint, which the run may remove meanwhile


class VanishedError(ConfigError):
    """A checkpoint was whole, and files of it are gone while it is read."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(
            f"{checkpoint} vanished while it was read: a run that is under way removes its older checkpoints "
            f"(checkpoint.keep_last); give one that stays, a best-….ckpt or one of checkpoint.keep_every_n_steps"
        )


def verify_resume(plan: Plan) -> Plan:
    """Check every byte of the checkpoint to resume from, and return the Plan to go on with.

    If it is damaged, resume=auto takes the newest undamaged one before it. Collective: each rank reads its share of
    the files.

    Raises:
        ConfigError: the named checkpoint is damaged, or all are; the message says which file.
    """
    notices, damaged = [], {}
    # Rank 0 decides: on a shared file system another rank may still see an older listing
    plan = plan.going_on_from(_of_rank_zero(plan.resume))
    while plan.resume is not None and (found := _damage(Path(plan.resume))):
        reason = f"{plan.resume} is damaged: {found}"
        if not plan.may_fall_back:
            raise ConfigError(f"resume={reason}; {another_than(Path(plan.resume))}")
        damaged[Path(plan.resume).name] = found
        before = _of_rank_zero([p for p in list_checkpoints(plan.run_dir) if p.name < Path(plan.resume).name])
        if not before:
            raise ConfigError(f"resume=auto: {none_is_whole(plan.run_dir, damaged)}")
        if dist.get_rank() == 0 and plan.stage == "fit" and found.endswith(_CHANGED):
            mark_damaged(Path(plan.resume), found)
        notices.append(f"{reason}; going on from {before[-1].name}")
        plan = plan.going_on_from(str(before[-1]))
    if dist.get_rank() == 0:
        for notice in notices:
            print(notice, flush=True)
    return plan


def _of_rank_zero(value: _T) -> _T:
    values: list[Any] = [value]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(values, src=0)
    found: _T = values[0]
    return found


def _damage(folder: Path) -> str | None:
    found = damage(folder) or changed(folder, dist.get_rank(), dist.get_world_size())
    return next(filter(None, gather_objects(None, found)), None)


def changed(folder: Path, rank: int = 0, ranks: int = 1) -> str | None:
    """Check the checksums of a rank's share of the files, and say what is wrong; None: nothing is."""
    try:
        files = read_json(folder / MANIFEST)["files"]
        for name in files:
            inside(folder, name)
    except OSError as error:
        return f"{MANIFEST} cannot be read ({error.strerror})"
    except ValueError as error:
        return f"{MANIFEST} cannot be read ({error})"

    def check(name: str) -> str | None:
        try:
            digest = sha256_of(folder / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        return None if digest == files[name]["sha256"] else f"{name}{_CHANGED}"

    with ThreadPoolExecutor(io_threads()) as pool:
        return next(filter(None, pool.map(check, sorted(files)[rank::ranks])), None)


def named_unchanged(given: str) -> tuple[Path, list[str]]:
    """As `named_checkpoint`, of which every file has the checksum that it was written with.

    Raises:
        ConfigError: the checkpoint that is named has not, or none of the run's.
        VanishedError: the checkpoint was removed meanwhile.
    """
    checkpoint, passed = named_checkpoint(given)
    every = list_checkpoints(Path(given).expanduser())  # none, if `given` is a checkpoint
    older = [path for path in every if path.name < checkpoint.name]
    found = changed(checkpoint)
    if found and damage(checkpoint):  # there was none a moment ago
        raise VanishedError(checkpoint)
    while found:
        passed.append(f"{checkpoint.name} is damaged: {found}")
        if not older:
            none = f"{given} holds no whole checkpoint: {'; '.join(passed)}"
            raise ConfigError(f"{none if every else f'{checkpoint} is damaged: {found}'}; give another checkpoint")
        checkpoint = older.pop()
        found = damage(checkpoint) or changed(checkpoint)
    return checkpoint, passed


def with_checkpoint(given: str, use: Callable[[Path, list[str]], _T]) -> _T:
    """Call `use` with what `named_unchanged` finds; again with a run's newest one, if the run has removed it meanwhile.

    Raises:
        ConfigError: there is no such checkpoint, or each that was tried has vanished.
    """
    tries = _TRIES if (Path(given).expanduser() / CHECKPOINTS).is_dir() else 1
    while True:
        tries -= 1
        try:
            checkpoint, damaged = named_unchanged(given)
            try:
                return use(checkpoint, damaged)
            except (OSError, ConfigError, CheckpointException):
                if damage(checkpoint) is None:
                    raise
                raise VanishedError(checkpoint) from None
        except VanishedError:
            if not tries:
                raise


def load_rest(folder: Path, trust: bool = False) -> tuple[dict[str, Any], dict[str, str]]:
    """Read what is the same on all ranks, except the tensors; also which keys are missing, with their classes."""
    return _load(folder / TRAINER_STATE, trust)


def load_own(folder: Path, rank: int, trust: bool = False) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """Read what `rank` has written, and which keys of it are missing.

    None: another number of ranks wrote the checkpoint.
    """
    manifest = read_json(folder / MANIFEST)
    if manifest["ranks"] != dist.get_world_size():
        return None, {}
    return _load(rank_state(folder, rank), trust)


def _load(path: Path, trust: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Read one file of a checkpoint. `trust`: its pickles may be read too, and any code in them runs."""
    written = torch.load(path, map_location="cpu", weights_only=True)
    unsafe = unsafe_file(path)
    return unpack(written, pickle.loads(unsafe.read_bytes()) if trust and unsafe.exists() else None)
