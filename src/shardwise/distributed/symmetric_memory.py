"""Memory in which every GPU of a group can read what the others have there: torch's symmetric memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import ConfigError

_WORD, _REMEDY = "strategy.symmetric_memory", "use strategy.symmetric_memory=false"


class SymmetricBuffer:
    """`size` bytes on each rank of `group`, all of which are on one node. Making it is collective.

    Raises:
        ConfigError: torch cannot share memory between these GPUs, or there is too little of it.
    """

    _free: Any = None  # the event from which on this rank may write into its bytes

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        with _or_refused():
            own = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
            self._handle = symmetric_memory.rendezvous(own, group.group_name)
        self._timeout_ms = int(timeout.total_seconds() * 1000)
        # Each rank's bytes, uint8 [size]. A copy from another rank's is made by a copy engine of the GPU.
        self.of_rank: list[Tensor] = [
            self._handle.get_buffer(rank, (size,), torch.uint8) for rank in range(group.size())
        ]

    def wait_for_all(self) -> None:
        """Let the current stream wait until the streams of all ranks have come to this call."""
        self._handle.barrier(channel=0, timeout_ms=self._timeout_ms)

    def begin(self, stream: Any) -> None:
        """Let `stream` wait until this rank may write into its bytes, which may be in use in another stream."""
        if self._free is not None:
            stream.wait_event(self._free)

    def end(self, stream: Any) -> Any:
        """Note that nothing after the present work of `stream` uses this rank's bytes. Returns the event of that."""
        self._free = stream.record_event()
        return self._free


def let_compiler_copy(group: dist.ProcessGroup) -> None:
    """Let torch.compile fetch what the ranks of `group` exchange by copies, piece by piece beside matrix products.

    It does so where its setting `_micro_pipeline_tp` is on and a gather stands before a product, or a scatter behind
    one. The memory for it grows with what is exchanged. Collective.

    Raises:
        ConfigError: torch cannot share memory between these GPUs.
    """
    from torch.distributed import _symmetric_memory as symmetric_memory

    with warnings.catch_warnings():  # it calls this unnecessary, and its compiler still asks whether it was called
        warnings.simplefilter("ignore", FutureWarning)
        symmetric_memory.enable_symm_mem_for_group(group.group_name)
    with _or_refused():
        symmetric_memory.get_symm_mem_workspace(group.group_name, min_size=1 << 20)


@contextmanager
def _or_refused() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{_WORD}: torch cannot let these GPUs copy from each other ({reason}); {_REMEDY}") from error


def goes_on_without(refusal: str) -> str:
    """What a run says that goes on in spite of this message of a `SymmetricBuffer`."""
    reason = refusal.removeprefix(f"{_WORD}: ").removesuffix(f"; {_REMEDY}")
    return f"{_WORD}=null: {reason}. All ranks use NCCL, which is slower for large layers"
