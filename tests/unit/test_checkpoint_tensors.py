"""Boxes: any range of a tensor's elements, written from some and read into others."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import resource
import signal
import threading
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from shardwise import accelerator
from shardwise.checkpoint import dcp as tensors
from shardwise.checkpoint import files
from shardwise.checkpoint import writer as pinned_memory
from shardwise.checkpoint.dcp import (
    Chunk,
    ChunkedTensor,
    ChunkSavePlanner,
    RankError,
    TensorWriter,
    range_of,
    read_metadata,
    read_tensors,
    whole,
)
from shardwise.checkpoint.files import changed
from shardwise.checkpoint.plain import Packed
from shardwise.checkpoint.publish import Snapshot
from shardwise.checkpoint.state import names_left_out
from shardwise.checkpoint.writer import Writer
from shardwise.errors import ConfigError
from shardwise.run_dir.checkpoints import damage
from tests.harness.patience import slowness
from tests.harness.processes import spawn

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def put(chunks: list[Chunk], into: Tensor) -> None:
    for chunk in chunks:
        place = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.values.shape, strict=True))
        assert (into[place] == -1).all(), "chunks overlap"
        into[place] = chunk.values


@given(SHAPES, st.data())
def test_a_range_is_cut_into_few_boxes(shape: list[int], data: st.DataObject) -> None:
    values = torch.arange(torch.Size(shape).numel())
    start = data.draw(st.integers(0, len(values)))
    end = data.draw(st.integers(start, len(values)))
    chunks = range_of(tuple(shape), start, values[start:end])
    found = torch.full(shape, -1)
    put(chunks, found)
    expected = torch.full_like(values, -1)
    expected[start:end] = values[start:end]
    assert torch.equal(found.view(-1), expected) and len(chunks) <= 2 * len(shape) - 1


def parts(tensor: Tensor, *cuts: int) -> ChunkedTensor:
    shape, flat = tuple(tensor.shape), tensor.view(-1)
    ends = zip((0, *cuts), (*cuts, flat.numel()), strict=True)
    return ChunkedTensor(shape, [chunk for start, end in ends for chunk in range_of(shape, start, flat[start:end])])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("cuts", [(), (17,), (1, 2, 29)])
@pytest.mark.parametrize("others", [(), (4, 5), (23,)])
@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_written_in_some_boxes_is_read_into_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: Any, others: Any, threads: int
) -> None:
    monkeypatch.setattr("shardwise.checkpoint.dcp.io_threads", lambda: threads)
    tensor, scalar = torch.randn(5, 3, 2), torch.tensor(3.0)
    TensorWriter(None).write(tmp_path / "written", {"a": parts(tensor, *cuts), "b": whole(scalar)})
    into, number = torch.zeros(5, 3, 2), torch.tensor(0.0)
    read_tensors(tmp_path / "written", {"a": parts(into, *others), "b": whole(number)}, None)
    assert len(list((tmp_path / "written").glob("__0_*"))) == min(threads, len(cuts) + 2)
    assert torch.equal(into, tensor) and torch.equal(number, scalar)
    plain = {"a": torch.zeros(5, 3, 2)}
    dcp.load(plain, checkpoint_id=str(tmp_path / "written"), no_dist=True)  # as anybody's code would
    assert torch.equal(plain["a"], tensor)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_who_writes_what_is_worked_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans, make = [], ChunkSavePlanner.create_local_plan
    monkeypatch.setattr(ChunkSavePlanner, "create_local_plan", lambda planner: plans.append(0) or make(planner))
    writer = TensorWriter(None)

    def write(name: str, value: float, width: int = 2) -> None:
        tensors = {key: whole(torch.full((3, width), value)) for key in "abc"}
        writer.write(tmp_path / name, tensors)
        into = {key: whole(torch.zeros(3, width)) for key in "abc"}
        read_tensors(tmp_path / name, into, None)
        assert all(torch.equal(into[key].chunks[0].values, tensors[key].chunks[0].values) for key in "abc")

    monkeypatch.setattr("shardwise.checkpoint.dcp.io_threads", lambda: 2)
    write("first", 1.0)
    write("second", 2.0)
    assert len(plans) == 1
    assert (tmp_path / "first" / ".metadata").read_bytes() == (tmp_path / "second" / ".metadata").read_bytes()
    (tmp_path / "third" / "__0_1_0.distcp").mkdir(parents=True)
    with pytest.raises(RankError, match="rank 0: IsADirectoryError"):
        write("third", 3.0)
    write("fourth", 4.0)  # anew: something went wrong
    write("fifth", 5.0)
    assert len(plans) == 2
    write("sixth", 6.0, width=3)  # another shape
    assert len(plans) == 3
    monkeypatch.setattr("shardwise.checkpoint.dcp.io_threads", lambda: 3)
    write("seventh", 7.0, width=3)  # in other files
    assert len(plans) == 4


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_whole_files_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """.metadata as well, whoever writes it."""
    sync = os.fsync
    synced: dict[int, int] = {}
    monkeypatch.setattr(os, "fsync", lambda n: (sync(n), synced.update({os.fstat(n).st_ino: os.fstat(n).st_size})))
    writer = TensorWriter(None)
    for name in ("anew", "again"):
        writer.write(tmp_path / name, {"a": whole(torch.randn(1000)), "b": whole(torch.tensor(1.0))})
        files = [path.stat() for path in (tmp_path / name).iterdir()]
        assert len(files) >= 2 and all(synced.get(file.st_ino) == file.st_size for file in files)


def one_then_all(folder: Path) -> None:
    """In a process of its own: a file's first piece is not summed up before three files are at it."""
    dist.init_process_group("gloo")
    here, sha256 = threading.Semaphore(0), hashlib.sha256
    pieces: list[int] = []
    values = {key: torch.randn(1000) for key in "abc"}
    snapshot = Snapshot({key: whole(value) for key, value in values.items()}, Packed(), Packed(), {}, frozenset())

    def save_watched(asynchronous: bool) -> None:
        first, together = iter("abc"), threading.Barrier(3)

        class Digest:
            def __init__(self) -> None:
                self.real, self.seen = sha256(), 0

            def update(self, piece: memoryview) -> None:
                if not self.seen and next(first, None):  # not of .metadata
                    here.release()
                    together.wait(20 * slowness())
                self.seen += len(piece)
                pieces.append(len(piece))
                self.real.update(piece)

            def hexdigest(self) -> str:
                return self.real.hexdigest()

        with patch.object(files, "hashlib", SimpleNamespace(sha256=Digest)):
            writer = Writer(asynchronous, torch.device("cpu"), timedelta(seconds=60))
            writer.save(folder / f"{asynchronous}", snapshot, lambda: None)
            assert here.acquire(timeout=20 * slowness())
            if asynchronous:
                assert not here.acquire(timeout=0.3), "a second one is at work beside the training"
            outcome = writer.wait()
        assert outcome is not None and outcome.error is None, outcome
        writer.close()

    with (
        patch.object(tensors, "io_threads", lambda: 3),
        patch.object(files, "io_threads", lambda: 3),
        patch.object(files, "_PIECE", 1000),
    ):
        for asynchronous in (True, False):
            save_watched(asynchronous)
            path = folder / f"{asynchronous}"
            assert len(list(path.glob("__*"))) == 3 and damage(path) is None and changed(path) is None
            into = {key: torch.zeros(1000) for key in values}
            read_tensors(path, {key: whole(value) for key, value in into.items()}, None)
            assert all(torch.equal(into[key], values[key]) for key in values)
    assert max(pieces) == 1000


def test_one_thread_writes_beside_the_training_and_all_once_it_waits(tmp_path: Path) -> None:
    spawn(1, one_then_all, tmp_path)


def test_pinned_memory_is_cut_into_parts_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """And lie in what is registered. Copies into them: benchmarks/exact_resume.py, on GPUs."""
    registered: dict[int, int] = {}
    monkeypatch.setattr(accelerator, "register_pinned", lambda address, size: registered.update({address: size}))
    monkeypatch.setattr(accelerator, "unregister_pinned", registered.pop)
    memory = pinned_memory.PinnedMemory()
    sizes = [3, 0, pinned_memory._SLAB // 16, 1, pinned_memory._SLAB // 4, 7, *[pinned_memory._SLAB // 40] * 12, 5]
    values = [torch.randn(size) for size in sizes] + [torch.tensor(2.0), torch.randn(5, 7).bfloat16()]
    held = [memory.like(one).copy_(one) for one in values]
    for one, copy in zip(values, held, strict=True):
        assert torch.equal(one, copy) and one.dtype == copy.dtype
        assert copy.untyped_storage().size() == one.nbytes  # DCP would copy it out of a larger one
        begins = [
            b for b, size in registered.items() if b <= copy.data_ptr() and copy.data_ptr() + one.nbytes <= b + size
        ]
        assert len(begins) == (1 if one.numel() else 0)
    assert sum(registered.values()) < 1.2 * sum(one.nbytes for one in values) + pinned_memory._SLAB
    memory.close()
    assert not registered


def of_two_ranks(folder: Path) -> int:
    """In each rank: the second holds other chunks than before, the first does not."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    writer = TensorWriter(dist.new_group(backend="gloo"))
    for number, cuts in enumerate(((3, 6), (3, 6), (3, 4, 6))):
        values = torch.full((6,), float(number))
        ranges = [(0, 3)] if rank == 0 else list(pairwise(cuts))
        chunks = [chunk for start, end in ranges for chunk in range_of((6,), start, values[start:end])]
        tensors = {"a": ChunkedTensor((6,), chunks)}
        writer.write(folder / f"{number}", tensors)
        dist.barrier()
    into = torch.full((6,), -1.0)
    read_tensors(folder / "2", {"a": whole(into)}, writer.group)
    assert into.tolist() == [2.0] * 6
    return len(list((folder / "1").iterdir()))


def test_what_one_rank_holds_otherwise_is_worked_out_by_all(tmp_path: Path) -> None:
    assert spawn(2, of_two_ranks, tmp_path) == [3, 3]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_goes_wrong_in_a_thread_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.checkpoint.dcp.io_threads", lambda: 3)
    (tmp_path / "__0_1_0.distcp").mkdir()
    tensors = {str(number): whole(torch.ones(4)) for number in range(3)}
    with pytest.raises(RankError, match="rank 0: IsADirectoryError"):
        TensorWriter(None).write(tmp_path, tensors)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_the_system_says_is_passed_on(tmp_path: Path) -> None:
    """torch.save has words of its own where a file cannot be written to its end."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        with pytest.raises(RankError, match=f"rank 0: OSError: .*{os.strerror(errno.EFBIG)}"):
            TensorWriter(None).write(tmp_path, {"a": whole(torch.ones(2**16))})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(print),
        b"\x80\x04\x8c%torch.distributed.checkpoint.metadata\x8c\x09os.system\x93\x8c\x04true\x85R.",
        b"\x80\x04\x8c%torch.distributed.checkpoint.metadata\x8c\x02os\x93.",
    ],
)
def test_metadata_that_ask_for_code_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ConfigError, match=r"asks for .*, which no checkpoint needs"):
        read_metadata(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_damaged_metadata_are_one_message(tmp_path: Path) -> None:
    TensorWriter(None).write(tmp_path, {"a": whole(torch.ones(4, 1))})
    content = (tmp_path / ".metadata").read_bytes()
    moved = read_metadata(tmp_path)
    for info in moved.storage_data.values():
        info.relative_path = "../" + info.relative_path
    nested = b"\x80\x04" + b"(" * 100_000 + b"l" * 100_000 + b"."
    for damaged in (b"", content[:-9], nested, b"\x80\x04N.", b"garbage", pickle.dumps(moved)):
        (tmp_path / ".metadata").write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"\.metadata cannot be read \(.+\); give another checkpoint"):
            read_metadata(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_does_not_fit_is_not_read(tmp_path: Path) -> None:
    TensorWriter(None).write(tmp_path / "written", {"a": whole(torch.ones(4, 1))})
    with pytest.raises(CheckpointException) as raised:
        read_tensors(tmp_path / "written", {"a": whole(torch.zeros(4, 6))}, None)
    assert str(raised.value.failures[0][0]) == "a is of shape (4, 1) there and (4, 6) here"


class LeavesOut(LightningModule):
    """A teacher, a head that shares a weight with it, and a student."""

    def __init__(self, strict: bool, prefix: str = "") -> None:
        super().__init__()
        self.strict_loading, self.prefix = strict, prefix
        self.teacher, self.head, self.student = nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.Linear(2, 2)
        self.head.weight = self.teacher.weight

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        given = super().state_dict(*args, **kwargs)
        return {self.prefix + name: value for name, value in given.items() if not name.startswith("teacher.")}


def test_what_a_module_leaves_out_of_checkpoints() -> None:
    numbers = {f"teacher.{name}" for name in ("bias", "running_mean", "running_var", "num_batches_tracked")}
    assert names_left_out(LeavesOut(strict=False)) == numbers
    assert not names_left_out(LeavesOut(strict=True))
    assert not names_left_out(LeavesOut(strict=False, prefix="other."))  # whose names say nothing of the module's
