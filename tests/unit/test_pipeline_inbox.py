"""When a stage receives, and when its host waits."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from shardwise.parallel.pipeline.engine import Inbox

ITEMS = [(1, 0), (1, 1), (1, 2)]


class FakeLink:
    def __init__(self) -> None:
        self.known: set[Hashable] = set()
        self.did: list[str] = []

    def knows(self, kind: Hashable) -> bool:
        return kind in self.known

    def receive(self, kind: Hashable) -> tuple[Tensor, Any]:
        self.known.add(kind)
        self.did.append("receive")
        return torch.zeros(1), self

    def wait(self) -> None:
        self.did.append("wait")

    def wait_on_host(self) -> None:
        self.did.append("wait on host")


def step(link: Any) -> list[str]:
    inbox = Inbox(link, ITEMS, lambda micro_batch: "shapes")
    link.did.clear()
    for item in ITEMS:
        inbox.take(item)
        link.did.append("compute")
    return list(link.did)


def test_nothing_is_received_before_it_is_needed() -> None:
    """The host waits in a step with new shapes: two ranks that load kernels then could wait for each other."""
    link = FakeLink()
    assert step(link) == ["receive", "wait", "wait on host", "compute"] * len(ITEMS)
    assert step(link) == ["receive", "wait", "compute"] * len(ITEMS)


def test_what_was_sent_before_is_kept() -> None:
    link: Any = FakeLink()
    inbox = Inbox(link, ITEMS, lambda micro_batch: "shapes")
    inbox.take(ITEMS[1])
    link.did.clear()
    inbox.take(ITEMS[0])
    inbox.take(ITEMS[2])
    assert link.did == ["receive", "wait", "wait on host"]
