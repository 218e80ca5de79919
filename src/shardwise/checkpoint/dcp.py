"""Writes and reads chunks of tensors through `torch.distributed.checkpoint` (DCP), the same way under every strategy.

A checkpoint knows a tensor by its name and its whole shape. The strategy decides which rank holds which part: all of
it (ddp), a slice of its first dimension (FSDP2), a range of its elements in row-major order (DeepSpeed). Each of these
is a handful of chunks, and chunks are what DCP writes and reads: nothing is ever gathered.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwise.checkpoint.chunks import ChunkedTensor
from shardwise.checkpoint.files import Pace, SummedFile, io_threads, without_crc, write_through
from shardwise.checkpoint.metadata import read_metadata
from shardwise.checkpoint.planners import ChunkLoadPlanner, ChunkSavePlanner
from shardwise.run_dir.files import TENSORS

_T = TypeVar("_T")


class RankError(Exception):
    """An error of one rank, with the rank's number. It may be raised on other ranks too."""

    def __init__(self, rank: int, error: BaseException) -> None:
        super().__init__(f"rank {rank}: " + " ".join(f"{type(error).__name__}: {error}".split())[:500])


def cause_of(error: BaseException) -> BaseException:
    """The system's error, such as a full disk, where torch.save hides it behind an error about its own file."""
    found: BaseException | None = error if isinstance(error, RuntimeError) else None
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


class _Reader(FileSystemReader):
    """Reads DCP's metadata, which is a pickle, without running code from it: see checkpoint/metadata.py."""

    def __init__(self, path: Path, metadata: Metadata | None = None) -> None:
        super().__init__(path)
        self._known = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._known or read_metadata(Path(self.path))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read several files at a time."""
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        with ThreadPoolExecutor(io_threads()) as pool:
            list(pool.map(lambda items: FileSystemReader.read_data(self, LoadPlan(items), planner), files.values()))
        return _done(None)


class _Files(FileSystem):
    """Computes the checksum of each file while it is written, and syncs the file to disk when it is closed.

    The checksum is of what should be in the file: nothing is read back for it.
    """

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.described: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        file = SummedFile(path, self.pace)
        with io.BufferedWriter(file, 2**16) as stream:
            yield stream
        self.described[Path(path).name] = {"bytes": file.bytes, "sha256": file.digest.hexdigest()}


class _Writer(FileSystemWriter):
    """DCP's writer in several threads of ours: threads that DCP starts lose their errors."""

    def __init__(self, path: Path, pace: Pace) -> None:
        # Without copies ahead, DCP does not wait for the training's stream. `_Files` syncs instead of DCP, which would
        # sync .metadata while its content is still in a buffer.
        super().__init__(path, sync_files=False, overwrite=True, per_thread_copy_ahead=0)
        self.fs = self._files = _Files(pace)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # without the path of the first checkpoint: .metadata is the same in every one

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.plan = plan
        prefix: str = plan.storage_data.prefix
        shares = [
            replace(plan, items=items, storage_data=replace(plan.storage_data, prefix=f"{prefix}{number}_"))
            for number, items in enumerate(_shares(plan.items, io_threads()))
        ]
        with ThreadPoolExecutor(len(shares)) as pool:
            try:
                written = list(pool.map(lambda share: FileSystemWriter.write_data(self, share, planner).wait(), shares))
            except RuntimeError as error:
                raise cause_of(error) from error
        self.results = [result for results in written for result in results]
        self.described = dict(self._files.described)
        return _done(self.results)


def _shares(items: list[WriteItem], most: int) -> list[list[WriteItem]]:
    """Divide `items` into at most `most` lists of about as many bytes each."""
    shares: list[list[WriteItem]] = [[] for _ in range(max(1, min(most, len(items))))]
    full = [0] * len(shares)
    for item in sorted(items, key=_bytes_of, reverse=True):
        least = full.index(min(full))
        shares[least].append(item)
        full[least] += _bytes_of(item)
    return shares


def _bytes_of(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _done(result: _T) -> Future[_T]:
    future: Future[_T] = Future()
    future.set_result(result)
    return future


class TensorWriter:
    """Writes the chunks of one checkpoint after another.

    It keeps DCP's plan, which says who writes what and where, for as long as every rank's names and shapes stay the
    same. Otherwise rank 0 would gather and answer all ranks' plans at every save: half a second of Python for four
    ranks of nine hundred tensors, in which the training beside it would wait for the interpreter.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.pace = Pace()
        self._known: tuple[list[Any], int] | None = None  # the chunks of the last save, and the number of threads
        self._metadata = b""  # the content of .metadata; on rank 0 only

    def set_pace(self, pace: Pace) -> None:
        self.pace = pace

    def take_group(self) -> dist.ProcessGroup | None:
        """Hand over the process group, which the caller destroys: nothing is written any more."""
        group, self.group = self.group, None
        return group

    def write(self, folder: Path, tensors: dict[str, ChunkedTensor]) -> dict[str, dict[str, Any]]:
        """Write every rank's chunks; a chunk that several ranks hold is written by one of them. Collective.

        Returns:
            `bytes` and `sha256` of each of this rank's files, by name.

        Raises:
            RankError: a rank could not write. It is raised on that rank alone, or on every rank.
        """
        chunks = [
            (name, tensor.shape, chunk.offsets, chunk.values.shape, chunk.values.dtype)
            for name, tensor in tensors.items()
            for chunk in tensor.chunks
        ]
        known, self._known = self._known, None
        with without_crc():
            if self._everywhere(known == (chunks, io_threads())):
                writer = self._write_again(folder, tensors)
            else:
                writer = self._write_anew(folder, tensors)
        self._known = chunks, io_threads()
        return writer.described

    def _write_anew(self, folder: Path, tensors: dict[str, ChunkedTensor]) -> _Writer:
        writer, planner = _Writer(folder, self.pace), ChunkSavePlanner(tensors)
        try:
            # The state_dict is empty: the planner has the tensors, and DCP would wrap and log each of them
            save({}, storage_writer=writer, planner=planner, process_group=self.group, no_dist=self.group is None)
        except CheckpointException as error:
            rank, (failure, _) = next(iter(error.failures.items()))
            raise RankError(rank, failure) from None
        self._plan, self._results = writer.plan, writer.results
        if _rank(self.group) == 0:
            self._metadata = (folder / TENSORS).read_bytes()
        return writer

    def _write_again(self, folder: Path, tensors: dict[str, ChunkedTensor]) -> _Writer:
        writer = _Writer(folder, self.pace)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            results = writer.write_data(self._plan, ChunkSavePlanner(tensors)).wait()
            if results != self._results:
                raise RuntimeError("what is written does not stand where it stood in the checkpoint before")
            if _rank(self.group) == 0:
                write_through(folder / TENSORS, self._metadata)
        except Exception as error:
            raise RankError(_rank(self.group), error) from None
        return writer

    def _everywhere(self, mine: bool) -> bool:
        if self.group is None:
            return mine
        verdict = torch.tensor(int(mine))
        dist.all_reduce(verdict, dist.ReduceOp.MIN, group=self.group)
        return bool(verdict)


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def read_tensors(
    folder: Path, tensors: dict[str, ChunkedTensor], group: dist.ProcessGroup | None, metadata: Metadata | None = None
) -> None:
    """Read tensors into the storage of their chunks, whatever chunks were written. Collective.

    `metadata`: the folder's metadata, where it has been read already: that of many ranks is large.
    """
    planner = ChunkLoadPlanner(flatten_state_dict=False)
    load(tensors, storage_reader=_Reader(folder, metadata), planner=planner, process_group=group, no_dist=group is None)
