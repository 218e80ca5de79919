"""`strategy.symmetric_memory`: FSDP2 gathers weights and scatters gradients by copies between the GPUs of a node.

The copy engines of the GPUs make the copies, beside which layers compute. Weights are cast into memory that the other
ranks see, and are copied from there to where a layer reads them: NCCL needs one more copy in front of its transfer, and
one behind it. Gradients travel in the dtype in which they were computed, and each rank adds up its part of all of them
in the dtype of the reduction. NCCL has them cast first: the sums are the same, up to their order from three ranks on,
and twice as many bytes travel.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    AllGatherResult,
    DefaultAllGather,
    DefaultReduceScatter,
)

from shardwise.distributed.mesh import Mesh, gather_objects, group_timeout, made_once
from shardwise.errors import ConfigError
from shardwise.parallel.precision import dtype_of
from shardwise.plan import Plan
from shardwise.strategies.whole_weights import groups_of

_ALIGNMENT = 16  # bytes
_TRIED = 4096  # bytes


def settle_copies(plan: Plan, mesh: Mesh, shard_mesh: DeviceMesh, device: torch.device) -> Plan:
    """`plan`, with True or False for what it leaves to a trial: whether ranks copy. Collective among all ranks.

    Each group of ranks that would copy shares a small piece of memory. All ranks of the run go the same way.

    Raises:
        ConfigError: copies are asked for, and a group cannot share memory.
    """
    weights, parts = plan.strategy.symmetric_memory, plan.compile.overlaps_peers
    groups = [shard_mesh.get_group("shard")] if weights is not False else []
    groups += [mesh.group("tensor")] if parts is not False else []
    if not groups:
        return plan
    refusals = []
    for group in groups:  # all of them, since ranks of another group may be well
        try:
            SymmetricBuffer(_TRIED, group, device, group_timeout(plan))
        except ConfigError as error:
            refusals.append(str(error))
    refusals = [refusal for of_rank in gather_objects(None, refusals) for refusal in of_rank]
    if refusals and (weights or parts):
        raise ConfigError(refusals[0])
    if refusals and dist.get_rank() == 0:
        print(goes_on_without(refusals[0]), flush=True)
    return replace(
        plan,
        strategy=replace(plan.strategy, symmetric_memory=weights is not False and not refusals),
        compile=replace(plan.compile, overlaps_peers=parts is not False and not refusals),
    )


def copy_between_ranks(units: Sequence[Any], plan: Plan) -> None:
    """Let `units`, which FSDP2 has sharded, exchange their weights and gradients by copies. Collective.

    All of them share the memory that is exchanged, which has room for the largest.
    """
    groups = [group for unit in units for group in groups_of(unit._get_fsdp_state())]
    if not groups:
        return
    _let_fsdp_ask()
    ranks, device, dtype = groups[0]._all_gather_process_group, groups[0].device, dtype_of(plan.precision.compute_dtype)
    shards = [[_size(p, dtype) for p in group.fsdp_params] for group in groups]
    gathered = max(sum(map(_aligned, sizes)) for sizes in shards)
    scattered = max(sum(sizes) for sizes in shards) * ranks.size()

    def buffer(size: int, use: str) -> SymmetricBuffer:
        timeout = group_timeout(plan)
        return made_once(
            ("symmetric", ranks.group_name, size, use), lambda: SymmetricBuffer(size, ranks, device, timeout)
        )

    later, weights = _FreedLater(), buffer(gathered, "weights")
    scatter = _Scatter(buffer(scattered, "gradients"), ranks.rank(), dtype, groups[0].device_handle)
    for unit in units:
        for group in groups_of(unit._get_fsdp_state()):
            unit.set_custom_all_gather(_Gather(group, weights, ranks.rank(), later))
            unit.set_custom_reduce_scatter(scatter)


def _size(param: Any, dtype: torch.dtype) -> int:
    """The bytes of this rank's shard as it is gathered, at most. Numbers that are no floats keep their own dtype."""
    own: torch.dtype = param.sharded_param.dtype
    each = dtype.itemsize if own.is_floating_point else max(own.itemsize, dtype.itemsize)
    return int(param._sharded_param_data.numel()) * each


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@functools.cache
def _let_fsdp_ask() -> None:
    """Let `_Gather` do all of a unit's gathering. torch's own hook replaces the transfer alone."""
    fsdp: Any = _fsdp_param_group
    gather, copy_out = fsdp.foreach_all_gather, fsdp.foreach_all_gather_copy_out

    def gathering(params: Any, group: Any, async_op: bool, before: Any, stream: Any, device: Any, by: Any) -> Any:
        if isinstance(by, _Gather):
            return by.gather(stream)
        return gather(params, group, async_op, before, stream, device, by)

    def copying_out(result: AllGatherResult, params: Any, group: Any) -> None:
        if isinstance(result, _Gathered):
            result.by.device_handle.current_stream().wait_event(result.all_gather_event)
        else:
            copy_out(result, params, group)

    fsdp.foreach_all_gather, fsdp.foreach_all_gather_copy_out = gathering, copying_out


class _Gathered(AllGatherResult):
    """The result of `_Gather`: when its event has come, the weights are where the layer reads them."""

    by: Any


class _FreedLater:
    """Keeps the memory of the unit that was freed last until another one is freed.

    Gathered weights are in memory of the gathering stream, in which the next unit is gathered while this one computes.
    FSDP2 frees them when the host has come to the end of the unit, before the GPU has. So the gathering stream waits
    for the end of the unit's computation before its memory is given to others, and that is only done when the next unit
    has been gathered: else gathering would wait for computing.
    """

    def __init__(self) -> None:
        self.unit: _Gather | None = None
        self.frees: list[Callable[[], None]] = []
        self.event: Any = None  # the end of the unit's computation

    def free(self, unit: _Gather, free: Callable[[], None]) -> None:
        """Free a parameter of `unit` later."""
        if unit is not self.unit:
            self._free_all()
            self.unit, self.event = unit, unit.device_handle.current_stream().record_event()
        self.frees.append(free)

    def _free_all(self) -> None:
        if self.unit is not None and self.unit.stream is not None:
            self.unit.stream.wait_event(self.event)
        for free in self.frees:
            free()
        self.unit, self.frees = None, []

    def take_back(self, unit: _Gather, stream: Any) -> None:
        """`unit` is gathered again, in `stream`: what was not freed yet is used again."""
        if unit is self.unit:
            stream.wait_event(self.event)
            self.unit, self.frees = None, []


class _Gather(DefaultAllGather):
    """Gathers one unit. A rank's shards stand one behind the other in the memory that others see."""

    def __init__(self, group: Any, buffer: SymmetricBuffer, rank: int, later: _FreedLater) -> None:
        self.params, self.buffer, self.rank, self.later = group.fsdp_params, buffer, rank, later
        self.device, self.device_handle = group.device, group.device_handle
        self.stream: Any = None  # whose memory the gathered weights are in
        self.parts: list[list[Tensor]] = []  # of each rank: its shards in the buffer
        for param in self.params:
            param.free_unsharded_param = functools.partial(later.free, self, param.free_unsharded_param)

    @torch.no_grad()
    def gather(self, stream: Any) -> AllGatherResult:
        """Cast this rank's shards and copy those of the others, in `stream`."""
        with self.device_handle.stream(stream):
            self.later.take_back(self, stream)
            self.buffer.begin(stream)
            shards = [self._shards_of(param) for param in self.params]
            if not self.parts:
                self._lay_out([(tensor.numel(), dtype) for tensor, dtype in chain(*shards)])
            wholes = self._make_room(shards, stream)
            own, ranks = self.parts[self.rank], len(self.parts)
            torch._foreach_copy_(own, [tensor for tensor, _ in chain(*shards)])
            self.buffer.wait_for_all()
            rows = [whole.view(ranks, -1) for whole in wholes]
            # Autograd must not take this for a change of weights that it has saved.
            counted = tuple(whole for whole in wholes if not whole.is_inference())
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(counted):
                for step in range(ranks):
                    other = (self.rank + step) % ranks
                    for row, part in zip(rows, self.parts[other], strict=True):
                        row[other].copy_(part)
            self.buffer.wait_for_all()
            result = _Gathered(self.buffer.of_rank[self.rank], self.buffer.end(stream), None, [], [], [])
        result.by = self
        return result

    def _shards_of(self, param: Any) -> list[tuple[Tensor, torch.dtype]]:
        """This rank's shard, with the dtype in which it is gathered; of a weight that is gathered in fp8, its parts."""
        if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
            return [(tensor, tensor.dtype) for tensor in param.all_gather_inputs]
        return [(param._sharded_param_data, param.param_dtype or param.orig_dtype)]

    def _lay_out(self, sizes: list[tuple[int, torch.dtype]]) -> None:
        for whole in self.buffer.of_rank:
            parts, begin = [], 0
            for number, dtype in sizes:
                parts.append(whole[begin : begin + number * dtype.itemsize].view(dtype))
                begin += _aligned(number * dtype.itemsize)
            self.parts.append(parts)

    def _make_room(self, shards: list[list[tuple[Tensor, torch.dtype]]], stream: Any) -> list[Tensor]:
        """The tensors that are to hold the whole weights."""
        wholes: list[Tensor] = []
        for param, parts in zip(self.params, shards, strict=True):
            sizes, dtypes = [tensor.numel() for tensor, _ in parts], [dtype for _, dtype in parts]
            param.init_all_gather_outputs(sizes, dtypes, len(self.parts), self.device)
            if any(not whole.untyped_storage().size() for whole in param.all_gather_outputs) or self.stream is None:
                self.stream = stream
            param.alloc_all_gather_outputs()
            wholes += param.all_gather_outputs
        return wholes


class _Scatter(DefaultReduceScatter):
    """Reduces the gradients of one unit after the other. `dtype`: that of the gradients."""

    def __init__(self, buffer: SymmetricBuffer, rank: int, dtype: torch.dtype, device_handle: Any) -> None:
        self.buffer, self.rank, self.dtype, self.device_handle = buffer, rank, dtype, device_handle
        self._gave_input = False

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks for the memory of what is reduced, then for that of the result, and then for the reduction."""
        self._gave_input = not self._gave_input
        if not self._gave_input:
            return super().allocate(size, dtype=dtype, device=device)
        self.buffer.begin(self.device_handle.current_stream())
        return self.buffer.of_rank[self.rank][: int(size[0]) * self.dtype.itemsize].view(self.dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        assert op == dist.ReduceOp.AVG, op
        # Ordinary memory, if a step that failed was passed over between the two calls of `allocate`
        assert input_tensor.data_ptr() == self.buffer.of_rank[self.rank].data_ptr(), "gradients are in other memory"
        ranks, part = group.size(), output_tensor.numel()
        begin = self.rank * part
        parts = list(input_tensor.new_empty(ranks, part))  # in the order of the ranks, whichever rank adds them up
        parts[self.rank] = input_tensor[begin : begin + part]
        self.buffer.wait_for_all()
        for step in range(1, ranks):
            other = (self.rank + step) % ranks
            parts[other].copy_(self.buffer.of_rank[other].view(self.dtype)[begin : begin + part])
        self.buffer.wait_for_all()
        _mean(output_tensor.device.type)(output_tensor, *parts)
        self.buffer.end(self.device_handle.current_stream())


@functools.cache
def _mean(device: str) -> Callable[..., None]:
    """Writes the mean of tensors, which is computed in the dtype of the result, in one pass over memory."""

    def mean(result: Tensor, first: Tensor, *others: Tensor) -> None:
        total = first.to(result.dtype)
        for other in others:
            total = total + other.to(result.dtype)
        result.copy_(total / (1 + len(others)))

    return torch.compile(mean, dynamic=True) if device == "cuda" else mean


# Memory in which every GPU of a group can read what the others have there: torch's symmetric memory.

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
