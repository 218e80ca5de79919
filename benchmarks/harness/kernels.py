"""Every kernel of a profiled step, not only the ten that the profile's own summary names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shardwise_tools.traces import read_trace
from shardwise_tools.traces.steps import step_windows, within
from shardwise_tools.traces.trace import KINDS


def costliest(trace: Path, most: int = 60) -> list[dict[str, Any]]:
    """Of the steps in a trace: kernels by name, with their kind, calls and milliseconds of all steps together."""
    read = read_trace(trace)
    windows = step_windows(read)
    device = within(read.device, windows[0].begin, windows[-1].end)
    spent = np.bincount(device.name, weights=device.end - device.begin, minlength=len(read.names))
    calls = np.bincount(device.name, minlength=len(read.names))
    kinds = dict(zip(device.name.tolist(), device.kind.tolist(), strict=True))
    return [
        {"name": read.names[name][:200], "kind": KINDS[kinds[name]], "calls": int(calls[name]),
         "ms": round(float(spent[name]) / 1e6, 4)}
        for name in np.argsort(-spent, kind="stable")[:most].tolist() if calls[name]
    ]  # fmt: skip
