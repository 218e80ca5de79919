"""Runs the actions of a pipeline's schedule: computes, sends, receives. plan/pipeline_schedule.py makes the lists.

A receiver takes what arrives in the order in which its neighbour's list sends it, and keeps what it does not need yet.
So no order of actions can mix two tensors up, whatever the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.accelerator import current_stream, has_streams
from shardwise.distributed.mesh import own_group
from shardwise.errors import ConfigError
from shardwise.plan.pipeline_schedule import Schedule

KINDS = {"F": "forward", "B": "backward"}
Item = tuple[int, int]  # the stage that receives, and the micro-batch


class Work(Protocol):
    """What a stage computes."""

    def compute(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        """The output of a stage: what the next one receives; of the last stage the loss to differentiate."""

    def differentiate(
        self, stage: int, micro_batch: int, output: Tensor, gradient: Tensor | None, is_last: bool, is_end: bool
    ) -> None:
        """Differentiate what `compute` gave. `gradient`: of the output; None in the last stage.

        `is_last`: no other backward of this stage follows in the step. `is_end`: none of this rank does.
        """

    def shapes(self, micro_batch: int) -> Hashable:
        """The shapes in the batch of a micro-batch: with equal ones, stages hand over equal shapes."""


class Engine:
    """One position of a pipeline of `positions` ranks. `stages`: of all positions together."""

    def __init__(self, position: int, positions: int, stages: int, links: Links) -> None:
        self.position, self.positions, self.stages, self.links = position, positions, stages, links
        self._notice: Callable[[str, bool], None] = lambda words, waits: None

    def call_before_each(self, notice: Callable[[str, bool], None]) -> None:
        """Call `notice` before each action, in words and with whether the rank waits, so that a watchdog can say it."""
        self._notice = notice

    def run(self, schedule: Schedule, work: Work) -> None:
        """Run one step: the own list of `schedule`, which has one for every position."""
        actions = schedule[self.position]
        last = {action.stage: action.micro_batch for action in actions if action.kind == "B"}
        inboxes = {kind: self._inbox(kind, schedule, work) for kind in self.links.inward}
        kept: dict[Item, tuple[Tensor | None, Tensor]] = {}  # the input and output of a forward, until its backward
        for action in actions:
            stage, number, kind = action.stage, action.micro_batch, action.kind
            words = f"{KINDS[kind]} of micro-batch {number + 1}"
            arrived = None
            if self._needs(stage, kind):
                self._notice_action(stage, words, kind)
                arrived = inboxes[kind].take((stage, number))
            self._notice_action(stage, words)
            if kind == "F":
                received = None if arrived is None else arrived.requires_grad_()
                output = work.compute(stage, number, received)
                kept[stage, number] = received, output
                if stage < self.stages - 1:
                    self.links.outward["F"].send(output, (stage + 1, work.shapes(number)))
                continue
            received, output = kept.pop((stage, number))
            work.differentiate(stage, number, output, arrived, number == last[stage], action is actions[-1])
            if received is not None:
                back = torch.zeros_like(received) if received.grad is None else received.grad
                self.links.outward["B"].send(back, (stage - 1, work.shapes(number)))
        self._notice("waiting until other stages have received what it sent", True)
        self.links.wait()
        self._notice("the end of its micro-batches", False)

    def evaluate(self, shapes: Hashable, forward: Callable[[int, Tensor | None], Any]) -> Any:
        """Let one batch pass through the own stages without gradients; gives the result of the last own stage.

        Nothing waits for the neighbours behind, so several batches are on their way at the same time.
        """
        result: Any = None
        for stage in range(self.position, self.stages, self.positions):
            received = None
            if stage:
                self._notice_action(stage, KINDS["F"], "F")
                received, work = self.links.inward["F"].receive((stage, shapes, "evaluation"))
                work.wait()
            self._notice_action(stage, KINDS["F"])
            result = forward(stage, received)
            if stage < self.stages - 1:
                self.links.outward["F"].send(result, (stage + 1, shapes, "evaluation"))
        self.links.forget_arrived()
        return result

    def _needs(self, stage: int, kind: str) -> bool:
        """Whether an action of this kind takes what another stage sends."""
        return stage > 0 if kind == "F" else stage < self.stages - 1

    def _notice_action(self, stage: int, words: str, waits_for: str | None = None) -> None:
        """Say what this rank does; `waits_for`: the kind of what has to arrive before it can."""
        of = {None: "", "F": f", waiting for stage {stage}", "B": f", waiting for stage {stage + 2}"}[waits_for]
        self._notice(f"stage {stage + 1} of {self.stages}, {words}{of}", waits_for is not None)

    def _inbox(self, kind: str, schedule: Schedule, work: Work) -> Inbox:
        step = 1 if kind == "F" else -1
        sender = schedule[(self.position - step) % self.positions]
        items = [
            (action.stage + step, action.micro_batch)
            for action in sender
            if action.kind == kind and 0 <= action.stage + step < self.stages
        ]
        return Inbox(self.links.inward[kind], items, work.shapes)


class Inbox:
    """What arrives on one link in one step, in the order of `items`.

    Nothing is received before it is needed: NCCL's kernel would hold multiprocessors while it waits, and the products
    beside it, which are cut for all of them, would be slower. The sender's kernel does not wait as long: over NVLink,
    32 MiB were in NCCL's buffers after 0.3 ms.

    Where a step has shapes that are new, the host waits for what arrives. Kernels are compiled and loaded then, and
    loading may wait until all that is on the device has run, a receive included: two ranks could wait for each other.
    """

    def __init__(self, link: Link, items: Sequence[Item], shapes: Callable[[int], Hashable]) -> None:
        self._link, self._shapes = link, shapes
        self._coming = deque(items)
        self._is_new = not all(link.knows(self._kind(item)) for item in items)
        self._arrived: dict[Item, Tensor] = {}

    def take(self, item: Item) -> Tensor:
        """Wait for a tensor; on a GPU only the device waits, unless shapes are new."""
        while item not in self._arrived:
            found = self._coming.popleft()
            self._arrived[found], work = self._link.receive(self._kind(found))
            work.wait()
            if self._is_new:
                self._link.wait_on_host()
        return self._arrived.pop(item)

    def _kind(self, item: Item) -> Hashable:
        return item[0], self._shapes(item[1])


# What neighbours in a pipeline send to each other.
#
# Tensors of one link arrive in the order in which they were sent. Each direction between two ranks has a process group
# of its own: NCCL orders all that two ranks exchange within a group, and would wait for ever where both send first.
#
# The shape of a tensor travels before it the first time only. All stages see the same batch, so where the shapes in a
# batch have been seen, the receiver knows what will come. Nothing is read from the device then.

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
