"""Plans for `torch.distributed.checkpoint`: which chunks this rank writes and reads."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardwise.checkpoint.chunks import Chunk, ChunkedTensor


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
