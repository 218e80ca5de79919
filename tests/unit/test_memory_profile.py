"""A snapshot of the allocator is read: what was held at the peak, in which category, and who allocated it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.metrics.memory_profile import CATEGORIES, Known, Span, summarize_memory
from shardwise_tools.traces.picture import draw_memory

MINE = {"filename": "/home/me/model.py", "line": 12, "name": "forward"}
TORCH = {"filename": "/venv/torch/nn/functional.py", "line": 5, "name": "linear"}
GATHER = {"filename": "/venv/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "line": 9,
          "name": "foreach_all_gather"}  # fmt: skip


def event(action: str, addr: int, size: int, time_us: float, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "time_us": time_us, "frames": list(frames), "stream": 0}


def snapshot() -> dict[str, Any]:
    """A step: a gather, activations, gradients, a temporary of the optimizer; weights and state are held all along."""
    trace = [
        event("alloc", 9000, 7, 50.0, MINE),  # before the window
        event("free_completed", 9000, 7, 60.0),
        event("alloc", 3000, 100, 110.0, GATHER),
        event("alloc", 4000, 400, 120.0, TORCH, MINE),
        event("free_requested", 3000, 100, 130.0),
        event("alloc", 3000, 60, 150.0),  # in the backward pass, by a thread without Python: the gradient, reusing it
        event("free_requested", 4000, 400, 160.0),
        event("free_completed", 4000, 400, 161.0),
        event("alloc", 5000, 30, 180.0, TORCH),
        event("free_requested", 5000, 30, 185.0),
        event("free_requested", 8000, 20, 190.0, MINE),  # was allocated before the window
    ]
    blocks = [
        {"address": 1000, "size": 256, "requested_size": 200, "state": "active_allocated", "frames": [MINE]},
        {"address": 1256, "size": 10, "state": "inactive", "frames": []},
        {"address": 2000, "size": 300, "requested_size": 300, "state": "active_allocated", "frames": []},
        {"address": 3000, "size": 60, "requested_size": 60, "state": "active_allocated", "frames": []},
    ]
    other_gpu = {"device": 1, "address": 7, "blocks": [{"size": 9999, "state": "active_allocated"}]}
    return {"segments": [{"device": 0, "address": 1000, "blocks": blocks}, other_gpu], "device_traces": [trace, []]}


KNOWN = [
    Known("parameters", 1000, 100.0), Known("parameters", 1100, 100.0),  # a flat buffer of two
    Known("optimizer", 2000, 100.0), Known("gradients", 3000, 170.0),
]  # fmt: skip
SPANS = [Span("forward", 105.0, 140.0), Span("backward", 140.0, 170.0), Span("optimizer", 172.0, 189.0)]


def test_every_byte_has_a_category_and_the_peak_is_found() -> None:
    summary = summarize_memory(snapshot(), known=KNOWN, spans=SPANS, begin_us=100.0)
    assert summary.peak_bytes == 200 + 300 + 20 + 100 + 400
    assert summary.at_peak == {
        "parameters": 200, "gradients": 0, "optimizer": 300, "activations": 400, "gathered": 100, "other": 20,
    }  # fmt: skip
    largest = [(block.bytes, block.category, block.place) for block in summary.largest]
    assert largest[:3] == [(400, "activations", "/home/me/model.py:12 (forward)"), (300, "optimizer", ""),
                           (200, "parameters", "/home/me/model.py:12 (forward)")]  # fmt: skip
    assert largest[3][2].endswith("_fsdp_collectives.py:9 (foreach_all_gather)")
    last = {name: curve[-1] for name, curve in summary.curves.items()}
    assert last == {"parameters": 200, "gradients": 60, "optimizer": 300, "activations": 0, "gathered": 0, "other": 0}
    assert max(summary.curves["gradients"]) == 60 and max(summary.curves["optimizer"]) == 330
    totals = [sum(sizes) for sizes in zip(*summary.curves.values(), strict=True)]
    assert max(totals) == summary.peak_bytes and len(totals) == len(summary.times_us)


def test_a_snapshot_without_history_shows_what_is_held(tmp_path: Path) -> None:
    summary = summarize_memory(snapshot() | {"device_traces": []})
    assert summary.peak_bytes == 560 and summary.at_peak["other"] == 560
    draw_memory(summary, tmp_path / "held.png")
    draw_memory(summarize_memory(snapshot(), known=KNOWN, spans=SPANS, begin_us=100.0), tmp_path / "step.png")
    for name in ("held.png", "step.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert set(json.loads(summary.to_json())["curves"]) == set(CATEGORIES)


def test_what_is_no_snapshot_is_refused() -> None:
    with pytest.raises(ValueError, match="this is no snapshot of CUDA's allocator: KeyError"):
        summarize_memory({"segments": []})
