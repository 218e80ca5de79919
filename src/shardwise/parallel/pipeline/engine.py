"""Runs the actions of a pipeline's schedule: computes, sends, receives. plan/pipeline_schedule.py makes the lists.

A receiver takes what arrives in the order in which its neighbour's list sends it, and keeps what it does not need yet.
So no order of actions can mix two tensors up, whatever the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.parallel.pipeline.links import Link, Links
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
