"""What neighbours in a pipeline send to each other.

Tensors of one link arrive in the order in which they were sent. Each direction between two ranks has a process group of
its own: NCCL orders all that two ranks exchange within a group, and would wait for ever where both send first.

The shape of a tensor travels before it the first time only. All stages see the same batch, so where the shapes in a
batch have been seen, the receiver knows what will come. Nothing is read from the device then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.accelerator import current_stream, has_streams
from shardwise.distributed.process_group import own_group
from shardwise.errors import ConfigError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMS = 8


class Link:
    """One direction between this rank and a neighbour."""

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._group, self._peer, self._device = group, peer, device
        self._shapes: dict[Hashable, tuple[tuple[int, ...], torch.dtype]] = {}
        self._sent: deque[tuple[Any, Tensor]] = deque()  # on their way: a tensor must live until it has arrived

    def send(self, tensor: Tensor, kind: Hashable) -> None:
        """Send `tensor` without waiting. All tensors of one `kind` have one shape.

        Raises:
            ConfigError: an earlier one had another shape.
        """
        tensor = tensor.detach().contiguous()
        now = tuple(tensor.shape), tensor.dtype
        if kind not in self._shapes:
            self._shapes[kind] = now
            self._begin(self._header(tensor))
        elif self._shapes[kind] != now:
            raise ConfigError(
                f"a stage of the pipeline gives {_words(now)} for a batch, and gave {_words(self._shapes[kind])} for "
                f"one of the same shapes: what stages hand over must follow from the shapes in the batch; use "
                f"strategy.pipeline_parallel_size=1"
            )
        self._begin(tensor)

    def knows(self, kind: Hashable) -> bool:
        """Whether the shape of this kind of tensors is known."""
        return kind in self._shapes

    def receive(self, kind: Hashable) -> tuple[Tensor, Any]:
        """Begin to receive the next tensor, which is of this kind. Gives the tensor, and what to wait for."""
        if kind not in self._shapes:
            header = torch.empty(_MOST_DIMS + 2, dtype=torch.int64, device=self._device)
            dist.recv(header, self._peer, group=self._group)
            dtype, dims, *sizes = header.tolist()
            self._shapes[kind] = tuple(sizes[:dims]), _DTYPES[dtype]
        shape, dtype = self._shapes[kind]
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        return tensor, dist.irecv(tensor, self._peer, group=self._group)

    def wait_on_host(self) -> None:
        """Let the host wait for what the current stream waits for."""
        if has_streams(self._device):
            current_stream(self._device).synchronize()

    def forget_arrived(self) -> None:
        """Let go of what has arrived."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def wait(self) -> None:
        """Wait until all that was sent has arrived; on a GPU only the device waits."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _begin(self, tensor: Tensor) -> None:
        self.forget_arrived()
        self._sent.append((dist.isend(tensor, self._peer, group=self._group), tensor))

    def _header(self, tensor: Tensor) -> Tensor:
        if tensor.dtype not in _DTYPES or tensor.ndim > _MOST_DIMS:
            raise ConfigError(
                f"a stage of the pipeline gives {_words((tuple(tensor.shape), tensor.dtype))}: stages hand over "
                f"floating-point tensors of up to {_MOST_DIMS} dimensions; use strategy.pipeline_parallel_size=1"
            )
        sizes = [*tensor.shape, *[0] * (_MOST_DIMS - tensor.ndim)]
        return torch.tensor([_DTYPES.index(tensor.dtype), tensor.ndim, *sizes], device=self._device)


class Links:
    """The links of this rank to the stages before and behind it, and the group of both ends of its pipeline.

    `pipelines`: the ranks of every pipeline of the run, by position. `wraps`: stages go on from the last position to
    the first. Collective among all ranks: each of them takes part in the making of every group, in the same order.
    """

    def __init__(
        self, pipelines: Sequence[Sequence[int]], wraps: bool, device: torch.device, timeout: timedelta
    ) -> None:
        def group(one: int, other: int, use: str) -> dist.ProcessGroup | None:
            return own_group([sorted((ranks[one], ranks[other])) for ranks in pipelines], timeout, use)

        own = next(ranks for ranks in pipelines if dist.get_rank() in ranks)
        count = len(own)
        self.ends = group(0, count - 1, "ends")
        self.inward: dict[str, Link] = {}  # "F", "B" → from where those come
        self.outward: dict[str, Link] = {}
        for kind, step in (("F", 1), ("B", -1)):
            for position in range(count):
                if not (wraps or 0 <= position + step < count):
                    continue
                source, target = own[position], own[(position + step) % count]
                pair = group(position, (position + step) % count, f"{kind} from {position}")
                if pair is not None and dist.get_rank() == source:
                    self.outward[kind] = Link(pair, target, device)
                elif pair is not None:
                    self.inward[kind] = Link(pair, source, device)

    def wait(self) -> None:
        """Wait until all that was sent has arrived."""
        for link in self.outward.values():
            link.wait()

    def forget_arrived(self) -> None:
        for link in self.outward.values():
            link.forget_arrived()


def _words(of: tuple[tuple[int, ...], torch.dtype]) -> str:
    return f"a tensor of shape {of[0]} in {str(of[1]).removeprefix('torch.')}"
