"""Pinned host memory that a save copies the device's tensors into."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

from shardwise import accelerator

SPARE_SHARE = 0.05  # the share of a device's memory that a save leaves free
_SLAB = 2**26  # bytes that are allocated at a time for small tensors


class PinnedMemory:
    """Allocates pinned memory of the host without holding up the training.

    For torch's pinned memory the driver makes the pages while it holds its lock, and the training can launch nothing
    in the meantime: 15 s for 24 GB. Here the pages are made first. (torch's `pinned_use_cuda_host_register` would do
    so too, but for the whole process, and it rounds 1.1 GB up to 2.)
    """

    def __init__(self) -> None:
        self._slabs: list[tuple[mmap.mmap, int]] = []  # each with its address
        self._shared, self._used = mmap.mmap(-1, 1), 1  # the slab that small tensors share, and its bytes in use

    def like(self, values: Tensor) -> Tensor:
        """An uninitialized pinned tensor of the form of `values`. It has a storage of its own, as DCP needs it."""
        bytes_ = values.nbytes
        if not bytes_:
            return torch.empty(values.shape, dtype=values.dtype)
        if bytes_ > _SLAB // 8:
            slab, begin = self._slab(bytes_), 0
        else:
            if self._used + bytes_ > len(self._shared):
                self._shared, self._used = self._slab(_SLAB), 0
            slab, begin = self._shared, self._used
            self._used += (bytes_ + 63) // 64 * 64
        return torch.frombuffer(slab, dtype=values.dtype, count=values.numel(), offset=begin).view(values.shape)

    def _slab(self, bytes_: int) -> mmap.mmap:
        try:
            slab = mmap.mmap(-1, bytes_, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            slab.madvise(mmap.MADV_DONTFORK)  # after a fork the child could keep the pages that the device copies to
            with suppress(OSError):  # some kernels have no huge pages
                slab.madvise(mmap.MADV_HUGEPAGE)
            address = torch.frombuffer(slab, dtype=torch.uint8).zero_().data_ptr()
            accelerator.register_pinned(address, bytes_)
        except (OSError, accelerator.PinError) as error:
            raise MemoryError(
                f"Tried to allocate {bytes_ / 2**20:.0f} MiB of the host's memory, pinned, for a checkpoint: {error}"
            ) from None
        self._slabs.append((slab, address))
        return slab

    def close(self) -> None:
        while self._slabs:
            accelerator.unregister_pinned(self._slabs.pop()[1])
        self._shared, self._used = mmap.mmap(-1, 1), 1
