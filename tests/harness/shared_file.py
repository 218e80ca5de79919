"""A stand-in for the symmetric memory of GPUs: a file that the ranks of one machine map into their memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.strategies.fsdp_symmetric_memory import SymmetricBuffer, _or_refused


class SharedFile(SymmetricBuffer):
    """What `SymmetricBuffer` gives, for CPUs."""

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
        assert device.type == "cpu"
        self.group, first = group, dist.get_global_rank(group, 0)
        names = [tempfile.mkdtemp() if dist.get_rank() == first else ""]
        dist.broadcast_object_list(names, first, group)
        file = Path(names[0]) / "memory"
        if dist.get_rank() == first:
            file.write_bytes(b"\xa5" * size * group.size())
        dist.barrier(group)
        memory = torch.from_file(os.fspath(file), shared=True, size=size * group.size(), dtype=torch.uint8)
        self.of_rank: list[Tensor] = list(memory.chunk(group.size()))
        dist.barrier(group)
        if dist.get_rank() == first:  # the memory stays while it is mapped
            shutil.rmtree(file.parent)

    def wait_for_all(self) -> None:
        dist.barrier(self.group)


class RefusedOnRankOne(SharedFile):
    """What a `SymmetricBuffer` does where torch cannot share the memory of one rank.

    In a container, for which this is, torch refuses all ranks of a node. Where it refuses one alone, the others wait.
    """

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
        super().__init__(size, group, device, timeout)
        if dist.get_rank() == 1:
            with _or_refused():
                raise RuntimeError("pidfd_getfd:\n  Operation not permitted")


REFUSED = "torch cannot let these GPUs copy from each other (pidfd_getfd: Operation not permitted)"
REFUSAL = f"strategy.symmetric_memory: {REFUSED}; use strategy.symmetric_memory=false"
NOTICE = f"strategy.symmetric_memory=null: {REFUSED}. All ranks use NCCL, which is slower for large layers"
