"""Context parallelism: every rank of the axis `context` computes a part of each sequence.

Two methods let attention reach the positions of other ranks:

- by heads (DeepSpeed-Ulysses): before attention the ranks exchange positions for heads, so that each has all positions
  of some heads, and after it they change back. Kernel and masks are those of one rank. The ranks divide the key heads.
- by keys (as Llama 3 was trained): each rank gathers all keys and values and computes its own positions. Any number of
  heads will do. A later position looks at more keys, so a rank has a run of positions from the front of the sequence
  and one as long from its end: then all ranks have equally much to do. Each run is computed with the keys up to its own
  end. FlashAttention takes the queries of a run for the last positions of these keys; other kernels are given a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.nn.attention import takes_later_queries

Attention = Callable[..., Tensor]


class ContextParallel:
    """How the sequences of one run are divided over a group of ranks: a `SequenceParts` of nn/attention.py.

    `tensors`: the keys of the batch's tensors that are divided along dim 1.
    """

    def __init__(self, group: dist.ProcessGroup, *, by_keys: bool, tensors: tuple[str, ...]) -> None:
        self.ranks, self.rank, self.group = group.size(), group.rank(), group.group_name
        self.by_keys, self.tensors = by_keys, tensors
        self.length = 0  # of this rank's part of the present batch

    # Batches

    def cut(self, batch: Any) -> Any:
        """This rank's part of a batch of whole sequences.

        Raises:
            ConfigError: the batch lacks a tensor that is divided, or its sequences cannot be divided.
        """
        rule = f"strategy.context_parallel_size={self.ranks}"
        if not isinstance(batch, Mapping):
            raise ConfigError(f"{rule}: the batch is no mapping with the keys {', '.join(self.tensors)}")
        for name in self.tensors:
            tensor = batch.get(name)
            if not isinstance(tensor, Tensor) or tensor.ndim < 2:
                raise ConfigError(
                    f"{rule}: the module's sequence_tensors names batch[{name!r}], which is no tensor "
                    f"[sequences, positions, …]"
                )
            if tensor.shape[1] % self.ranks:
                raise ConfigError(
                    f"{rule}: batch[{name!r}] has sequences of {tensor.shape[1]} positions, which {self.ranks} ranks "
                    f"cannot divide equally; make their length a multiple of {self.ranks}"
                )
        return {**batch, **{name: _pinned_as(self.own(batch[name], 1), batch[name]) for name in self.tensors}}

    def begin_batch(self, batch: Any) -> None:
        """Note the length of this rank's part of the batch that a step is about to see."""
        self.length = batch[self.tensors[0]].shape[1]

    # What layers ask for

    def runs(self, whole: int) -> list[tuple[int, int]]:
        """Begin and end of each run of this rank's positions, in sequences of `whole` positions."""
        halves = 2 * self.ranks
        if self.by_keys and whole % halves == 0:
            size = whole // halves
            return [(i * size, (i + 1) * size) for i in (self.rank, halves - 1 - self.rank)]
        size = whole // self.ranks
        return [(self.rank * size, (self.rank + 1) * size)]

    def layout(self, positions: Tensor, documents: Tensor | None, *, makes_masks: bool) -> dict[str, Any]:
        whole = positions.shape[-1]
        self._check_length(whole // self.ranks)
        own = self.own(positions, -1)
        masks = {"masks": self._masks(documents, whole, own.device)} if self.by_keys and makes_masks else {}
        return {"positions": own} | masks

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """Of a tensor with all positions along `dim`: those of this rank."""
        return torch.cat([whole.narrow(dim, begin, end - begin) for begin, end in self.runs(whole.shape[dim])], dim)

    def _masks(self, documents: Tensor | None, whole: int, device: torch.device) -> list[Tensor]:
        found = []
        for begin, end in self.runs(whole):
            rows, keys = torch.arange(begin, end, device=device), torch.arange(end, device=device)
            visible = (rows[:, None] >= keys)[None]
            if documents is not None:
                visible = visible & (documents[:, begin:end, None] == documents[:, None, :end])
            found.append(visible.unsqueeze(1))
        return found

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layout: dict[str, Any], kernel: str, attention: Attention
    ) -> Tensor:
        self._check_length(q.shape[2])
        if self.by_keys:
            return self._by_keys(q, k, v, layout, kernel, attention)
        self._check_heads(k.shape[1])
        part = attention(*self._all_positions(q, k, v), layout, kernel)
        return self._all_heads(part)

    def attend_with(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, attention: Callable[..., Tensor]
    ) -> Tensor:
        """Attention of this rank's positions by `attention(q, k, v, mask)`, which knows no rank.

        `mask`: bool, by heads that of whole sequences or None, and by keys this rank's rows of it.
        """
        if not self.by_keys:
            self._check_heads(k.shape[1])
            return self._all_heads(attention(*self._all_positions(q, k, v), mask))
        assert mask is not None
        if k.shape == v.shape:
            k, v = self._gathered(torch.stack((k, v)))
        else:
            k, v = (self._gathered(x.unsqueeze(0)).squeeze(0) for x in (k, v))
        runs = self.runs(q.shape[2] * self.ranks)
        sizes = [end - begin for begin, end in runs]
        outs = [
            attention(rows, k[:, :, :end], v[:, :, :end], own[..., :end])
            for (_, end), rows, own in zip(runs, torch.split(q, sizes, 2), torch.split(mask, sizes, 2), strict=True)
        ]
        return torch.cat(outs, dim=2)

    def _check_length(self, length: int) -> None:
        if length != self.length:
            raise ConfigError(
                f"strategy.context_parallel_size={self.ranks}: attention was asked for over {length} positions, and "
                f"this rank's part of the batch has {self.length}: a step may run the model on its batch alone"
            )

    def _check_heads(self, heads: int) -> None:
        if heads % self.ranks:
            raise ConfigError(
                f"strategy.context_parallel_size={self.ranks} strategy.context_parallel_method=heads: a rank has "
                f"{heads} key heads, which {self.ranks} ranks cannot divide equally; use "
                f"strategy.context_parallel_method=keys"
            )

    # By heads

    def _all_positions(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, heads, part, D] of this rank's positions -> [B, heads / ranks, whole, D] of some heads."""
        if q.shape[3] != v.shape[3]:
            q, k = self._exchanged(q, k)
            (v,) = self._exchanged(v)
            return q, k, v
        q, k, v = self._exchanged(q, k, v)
        return q, k, v

    def _exchanged(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        counts = [x.shape[1] // self.ranks for x in tensors]
        by_rank = torch.cat([_split(x, 1, self.ranks) for x in tensors], dim=2)  # [B, ranks, heads, part, D]
        arrived = exchange(by_rank.transpose(0, 1), self.group)  # [ranks, B, heads, part, D], in the order of positions
        return torch.split(arrived.permute(1, 2, 0, 3, 4).flatten(2, 3), counts, dim=1)

    def _all_heads(self, part: Tensor) -> Tensor:
        """[B, heads / ranks, whole, D] -> [B, heads, part, D]."""
        by_rank = _split(part, 2, self.ranks).permute(2, 0, 1, 3, 4)  # [ranks, B, heads, part, D]
        return exchange(by_rank, self.group).transpose(0, 1).flatten(1, 2)

    # By keys

    def _by_keys(
        self, q: Tensor, k: Tensor, v: Tensor, layout: dict[str, Any], kernel: str, attention: Attention
    ) -> Tensor:
        length = q.shape[2]
        runs = self.runs(length * self.ranks)
        masks = layout.get("masks")
        if masks is None and not takes_later_queries(q, q.dtype, q.shape[3], kernel):
            masks = self._masks(None, length * self.ranks, q.device)
        if masks is not None and kernel != "math" and q.is_cuda and q.dtype != torch.float64:
            kernel = "efficient"  # FlashAttention takes no mask, and cuDNN with one is wrong for some lengths
        k, v = self._gathered(torch.stack((k, v)))
        of_runs = [layout] * len(runs) if masks is None else [{**layout, "mask": mask} for mask in masks]
        outs = [
            attention(rows, k[:, :, :end], v[:, :, :end], own, kernel)
            for rows, (_, end), own in zip(
                torch.split(q, [end - begin for begin, end in runs], dim=2), runs, of_runs, strict=True
            )
        ]
        return torch.cat(outs, dim=2)

    def _gathered(self, keys_and_values: Tensor) -> Tensor:
        """[2, B, heads, part, D] -> [2, B, heads, whole, D], in the order of positions."""
        length = keys_and_values.shape[3]
        runs = self.runs(length * self.ranks)
        parts = gather(keys_and_values, self.group, self.ranks)  # [ranks, 2, B, heads, part, D]
        by_run = _split(parts, 4, len(runs)).unbind(4)
        ordered = [by_run[0], *(part.flip(0) for part in by_run[1:])]  # from the end the ranks come backwards
        return torch.cat(ordered).movedim(0, 3).flatten(3, 4)


def _split(tensor: Tensor, dim: int, parts: int) -> Tensor:
    """Make of dim two: the number of the part, and the place in it."""
    shape = tensor.shape
    return tensor.reshape(*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])


def _pinned_as(part: Tensor, whole: Tensor) -> Tensor:
    """`part`, in pinned memory if `whole` is: its copy to the device must not make the host wait."""
    return part.pin_memory() if whole.device.type == "cpu" and whole.is_pinned() else part


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradient, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        c10d = torch.ops._c10d_functional
        joined = c10d.all_gather_into_tensor(part.contiguous().unsqueeze(0), ranks, group)
        whole: Tensor = c10d.wait_tensor(joined)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        c10d = torch.ops._c10d_functional
        summed = c10d.reduce_scatter_tensor(gradient.contiguous(), "sum", ctx.ranks, ctx.group)
        return c10d.wait_tensor(summed).squeeze(0), None, None


def exchange(parts: Tensor, group: str) -> Tensor:
    """[ranks, …]: part i goes to rank i of the group, and part i of the result has come from it."""
    found: Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return found


def gather(part: Tensor, group: str, ranks: int) -> Tensor:
    """[…] -> [ranks, …], of every rank of the group. The gradients of all ranks are summed."""
    found: Tensor = _Gather.apply(part, group, ranks)  # type: ignore[no-untyped-call]
    return found


class _SumLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: str, ranks: int) -> Tensor:
        ctx.ranks = ranks
        c10d = torch.ops._c10d_functional
        total: Tensor = c10d.wait_tensor(c10d.all_reduce(part, "sum", group))
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.ranks, None, None


def sum_losses(part: Tensor, parts: ContextParallel) -> Tensor:
    """The loss of whole sequences, on every rank, of what each rank's part adds to it.

    Gradients are averaged over the ranks later on, so each part has as many times its own gradient as there are ranks.
    """
    found: Tensor = _SumLosses.apply(part, parts.group, parts.ranks)  # type: ignore[no-untyped-call]
    return found


def _all_to_all(parts: Tensor, group: str) -> Tensor:
    c10d = torch.ops._c10d_functional
    sizes = [1] * parts.shape[0]
    arrived: Tensor = c10d.wait_tensor(c10d.all_to_all_single(parts.contiguous(), sizes, sizes, group))
    return arrived
