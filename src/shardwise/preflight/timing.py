"""Times what a device does."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from shardwise import accelerator


def seconds_of(operation: Callable[[], Any], device: torch.device, times: int) -> float:
    """The time of one operation, of so many that are timed.

    On a GPU it is the median; on a CPU, whose cores also do other work, the least.
    """
    if accelerator.has_streams(device):
        events = [accelerator.new_event(device, timed=True) for _ in range(times + 1)]
        events[0].record()
        for event in events[1:]:
            operation()
            event.record()
        events[-1].synchronize()
        return float(median(a.elapsed_time(b) / 1e3 for a, b in pairwise(events)))
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        operation()
        accelerator.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
