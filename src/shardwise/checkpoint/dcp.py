"""Writes and reads chunks of tensors through `torch.distributed.checkpoint` (DCP), the same way under every strategy.

A checkpoint knows a tensor by its name and its whole shape. The strategy decides which rank holds which part: all of
it (ddp), a slice of its first dimension (FSDP2), a range of its elements in row-major order (DeepSpeed). Each of these
is a handful of chunks, and chunks are what DCP writes and reads: nothing is ever gathered.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.futures import Future

from shardwise.checkpoint.files import Pace, SummedFile, io_threads, without_crc, write_through
from shardwise.errors import ConfigError
from shardwise.run_dir.files import TENSORS, inside, open_regular

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
    """Reads DCP's metadata, which is a pickle, without running code from it."""

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


# Plans for `torch.distributed.checkpoint`: which chunks this rank writes and reads.


class ChunkSavePlanner(DefaultSavePlanner):
    """Plans to write every chunk that this rank holds."""

    def __init__(self, tensors: dict[str, ChunkedTensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors = tensors
        self._values = {
            _index(name, chunk): chunk.values for name, tensor in tensors.items() for chunk in tensor.chunks
        }

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, tensor in self._tensors.items():
            for chunk in tensor.chunks:
                data = TensorWriteData(
                    chunk.bounds, TensorProperties(dtype=chunk.values.dtype), torch.Size(tensor.shape)
                )
                items.append(WriteItem(_index(name, chunk), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._values[index]


def _index(name: str, chunk: Chunk) -> MetadataIndex:
    return MetadataIndex(name, torch.Size(chunk.offsets))


class ChunkLoadPlanner(DefaultLoadPlanner):
    """Plans to read, for every chunk that this rank holds, the parts of written chunks that overlap with it."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        self._values = {
            (name, chunk.offsets): chunk.values for name, s in self.state_dict.items() for chunk in s.chunks
        }
        items = []
        for name, tensor in self.state_dict.items():
            known = self.metadata.state_dict_metadata[name]
            assert isinstance(known, TensorStorageMetadata)
            if known.size != torch.Size(tensor.shape):
                raise ValueError(f"{name} is of shape {tuple(known.size)} there and {tensor.shape} here")
            reads = create_read_items_for_chunk_list(name, known, [chunk.bounds for chunk in tensor.chunks])
            if sum(prod(item.lengths) for item in reads) != sum(chunk.values.numel() for chunk in tensor.chunks):
                raise ValueError(f"{name} is not all there")
            items += reads
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        found: Tensor = self._values[index.fqn, tuple(index.offset)]
        return found


# The description of a checkpoint's tensors, read without running code from it.

_PATHS = {"Path", "PosixPath", "PurePosixPath"}
_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, (torch.dtype, torch.layout))}
_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "device", *_DTYPES},
    "torch.serialization": {"_get_layout"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}  # fmt: skip


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _KNOWN.get(module, ()) and "." not in name:  # a dotted name reaches into what a module imports
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f".metadata asks for {module}.{name}, which no checkpoint needs")


def read_metadata(folder: Path) -> Metadata:
    """The description of a checkpoint's tensors.

    Raises:
        ConfigError: it is damaged, asks for what no checkpoint needs, or names files outside of the checkpoint.
    """
    try:
        with open_regular(folder / TENSORS) as file:
            metadata = _Metadata(file).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"it holds a {type(metadata).__name__}")
        for name in {info.relative_path for info in (metadata.storage_data or {}).values()}:
            inside(folder, name)
    except OSError:
        raise
    except Exception as error:  # whatever a stream of bytes makes an unpickler do
        raise ConfigError(
            f"{folder / TENSORS} cannot be read ({error or type(error).__name__}); give another checkpoint"
        ) from None
    return metadata


# Which part of a tensor a rank holds, as chunks: pure arithmetic.


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor: `values` begin at `offsets` of the whole tensor."""

    offsets: tuple[int, ...]
    values: Tensor

    @property
    def bounds(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.values.shape)


@dataclass(frozen=True)
class ChunkedTensor:
    """A tensor of `shape` of which this rank holds some chunks, or none."""

    shape: tuple[int, ...]
    chunks: list[Chunk]


def whole(values: Tensor) -> ChunkedTensor:
    """The chunked form of a tensor that every rank holds whole."""
    return ChunkedTensor(tuple(values.shape), [Chunk((0,) * values.ndim, values)])


def slice_of(tensor: Tensor, local: Tensor, first: tuple[int, int] = (0, 0)) -> list[Chunk]:
    """`local` as a chunk of `tensor`, which may be a DTensor. `local` has the shape of this rank's part of it.

    `first`: a dim, and where `tensor` begins in it, if `tensor` is a part of the whole itself.
    """
    offsets: tuple[int, ...] = (0,) * local.ndim
    if isinstance(tensor, DTensor):
        offsets = _offsets(tensor.shape, tensor.device_mesh, tensor.placements)
        if not local.numel():
            return []
    dim, start = first
    return [Chunk(tuple(o + start * (i == dim) for i, o in enumerate(offsets)), local)]


@cache  # a parameter's moments have the same offsets, as have later saves, and each computation takes 80 µs
def _offsets(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[int, ...]:
    return tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[1])


def range_of(shape: tuple[int, ...], start: int, values: Tensor) -> list[Chunk]:
    """Cut a range of a tensor's elements, in row-major order, into at most 2 * ndim - 1 chunks.

    `values` is flat: the elements from `start` on of a tensor of `shape`. The chunks share its storage.
    """
    if not shape:
        return [Chunk((), values.view(()))] if values.numel() else []
    return [Chunk(offsets, part) for offsets, part in _cut(shape, start, values, ())]


def _cut(
    shape: tuple[int, ...], start: int, values: Tensor, before: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield a first row that is there in part, the whole rows, and a last row in part.

    `before`: the offsets in the dimensions outside of `shape`.
    """
    if not values.numel():
        return
    outer, row = (1,) * len(before), prod(shape[1:])
    first, within = divmod(start, row)
    if within or values.numel() < row:
        many = min(row - within, values.numel())
        yield from _cut(shape[1:], within, values[:many], (*before, first))
        values, first = values[many:], first + 1
    if rows := values.numel() // row:
        offsets = (*before, first, *(0 for _ in shape[1:]))
        yield offsets, values[: rows * row].view(*outer, rows, *shape[1:])
    yield from _cut(shape, (first + rows) * row, values[rows * row :], before)
