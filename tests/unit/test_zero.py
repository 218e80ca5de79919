"""What is changed in DeepSpeed's ZeRO, apart from its engine. On GPUs: benchmarks/gpu_checks/knobs.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shardwise.strategies.zero.internals import keep_gradients_until_reduced


class Gradient:
    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def record_stream(self, stream: Any) -> None:
        self.events.append(("is read on", stream))


def test_memory_of_a_gradient_is_kept_for_the_stream_that_reduces_it() -> None:
    events: list[Any] = []
    optimizer = SimpleNamespace(
        overlap_comm=True, reduction_stream="side", average_tensor=lambda *of: events.append(("reduced", *of[1:]))
    )
    keep_gradients_until_reduced(optimizer)
    optimizer.average_tensor(Gradient(events), "fp32")
    assert events == [("reduced", "fp32"), ("is read on", "side")]
