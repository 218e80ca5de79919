"""Reads a snapshot of CUDA's allocator: what held memory, by category, over the time that its history covers.

A snapshot is what torch gives and writes as a pickle: `segments` with the blocks that are held now, and `device_traces`
with what was allocated and freed before. No torch is imported here.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "gathered", "other")
MOST_BLOCKS = 10
_POINTS = 2000  # of the curve: more than a picture has columns
# Parts of the names of functions → category, of blocks that hold no known tensor of the run; the first decides
_BY_FRAME = (
    ("gathered", ("all_gather", "allgather", "fetch_sub_module")),
    ("gradients", ("reduce_scatter", "foreach_reduce", "reduce_ipg", "ipg_bucket", "average_tensor")),
)
_BY_PHASE = {"forward": "activations", "backward": "activations", "optimizer": "optimizer"}
_NOT_OURS = ("/torch/", "/lightning/", "/deepspeed/", "<")


@dataclass(frozen=True)
class Known:
    """A tensor of the run's that lay at `address` at `time_us`."""

    category: str
    address: int
    time_us: float


@dataclass(frozen=True)
class Span:
    """When the host was in a phase of a step."""

    phase: str
    begin_us: float
    end_us: float


@dataclass(frozen=True)
class Block:
    """A block of memory that was held at the peak."""

    bytes: int
    category: str
    place: str  # file:line (function); empty: the history does not have it


@dataclass(frozen=True)
class MemorySummary:
    """What held memory. The bytes of all categories are those that tensors hold, without what the allocator keeps."""

    peak_bytes: int
    at_peak: dict[str, int]  # category → bytes
    largest: tuple[Block, ...]  # at the peak
    times_us: tuple[float, ...] = field(repr=False)  # since the begin
    curves: dict[str, tuple[int, ...]] = field(repr=False)  # category → bytes at these times

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @property
    def text(self) -> str:
        """Some lines for the user."""
        parts = [f"{name} {size / 2**30:.2f}" for name, size in self.at_peak.items() if size]
        lines = [f"memory: {self.peak_bytes / 2**30:.2f} GiB at the peak: {', '.join(parts) or 'nothing'}"]
        for block in self.largest:
            lines.append(
                f"  {block.bytes / 2**20:10.1f} MiB  {block.category:<12}{block.place or 'place not recorded'}"
            )
        return "\n".join(lines)


@dataclass
class _Held:
    """A block over the time in which it was held. None: it was held before, or is held after, the history."""

    address: int
    bytes: int
    begin: float | None
    end: float | None
    frames: Sequence[dict[str, Any]]
    category: str = "other"


def summarize_memory(
    snapshot: dict[str, Any], *, device: int = 0, known: Iterable[Known] = (), spans: Iterable[Span] = (),
    begin_us: float = float("-inf"),
) -> MemorySummary:  # fmt: skip
    """Read a snapshot. Only what happened from `begin_us` on counts; what was held then counts as held.

    Raises:
        ValueError: this is no snapshot.
    """
    try:
        history = snapshot["device_traces"]
        events = [event for event in (history[device] if device < len(history) else ()) if event["time_us"] >= begin_us]
        held = _lives(_live_blocks(snapshot["segments"], device), events)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"this is no snapshot of CUDA's allocator: {error!r} is missing") from None
    _categorize(held, list(known), sorted(spans, key=lambda span: span.begin_us))
    return _summary(held, events)


def _live_blocks(segments: Iterable[dict[str, Any]], device: int) -> dict[int, dict[str, Any]]:
    """Address → block that a tensor holds now."""
    found = {}
    for segment in segments:
        if segment.get("device", 0) != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            address = block.get("address", address)
            if block["state"] == "active_allocated":
                found[address] = block
            address += block["size"]
    return found


def _lives(live: dict[int, dict[str, Any]], events: Sequence[dict[str, Any]]) -> list[_Held]:
    """Every block, with when it was held: forward through the history, then those that are still held."""
    open_blocks: dict[int, _Held] = {}
    held: list[_Held] = []
    for event in events:
        action, address, now = event["action"], event.get("addr", 0), event["time_us"]
        if action == "alloc":
            block = _Held(address, event["size"], now, None, event.get("frames", ()))
            open_blocks[address] = block
            held.append(block)
        elif action == "free_requested":  # free_completed may come later, when other streams are done with it
            known = open_blocks.pop(address, None)
            if known is None:  # it was allocated before the history begins
                held.append(_Held(address, event["size"], None, now, event.get("frames", ())))
            else:
                known.end = now
    for address, now_held in live.items():
        if address not in open_blocks:
            size = now_held.get("requested_size") or now_held["size"]
            held.append(_Held(address, size, None, None, now_held.get("frames", ())))
    return held


def _categorize(held: list[_Held], known: list[Known], spans: list[Span]) -> None:
    by_address: dict[int, list[Known]] = {}
    for tensor in known:
        by_address.setdefault(tensor.address, []).append(tensor)
    addresses, begins = sorted(by_address), [span.begin_us for span in spans]
    for block in held:
        first = bisect_right(addresses, block.address - 1)
        inside = addresses[first : bisect_right(addresses, block.address + block.bytes - 1)]
        tensors = (tensor for address in inside for tensor in by_address[address])
        mine = next((one for one in tensors if _is_held(block, one.time_us)), None)
        block.category = mine.category if mine is not None else _guess(block, spans, begins)


def _is_held(block: _Held, time_us: float) -> bool:
    return (block.begin is None or block.begin <= time_us) and (block.end is None or block.end >= time_us)


def _guess(block: _Held, spans: list[Span], begins: list[float]) -> str:
    """The category of a block that no known tensor holds: by the code that allocated it, else by the phase."""
    if block.begin is None:
        return "other"
    for category, parts in _BY_FRAME:
        if any(part in frame.get("name", "") for frame in block.frames for part in parts):
            return category
    at = bisect_right(begins, block.begin) - 1
    if at >= 0 and block.begin <= spans[at].end_us:
        return _BY_PHASE.get(spans[at].phase, "other")
    return "other"


def _summary(held: list[_Held], events: Sequence[dict[str, Any]]) -> MemorySummary:
    first = events[0]["time_us"] if events else 0.0
    changes = sorted(
        [(block.begin, block.bytes, block.category) for block in held if block.begin is not None]
        + [(block.end, -block.bytes, block.category) for block in held if block.end is not None]
    )  # of one moment, what is freed comes first
    now = {name: sum(b.bytes for b in held if b.begin is None and b.category == name) for name in CATEGORIES}
    total = peak = sum(now.values())
    at_peak, peak_time = dict(now), first
    times, curves = [0.0], {name: [now[name]] for name in CATEGORIES}
    every = max(1, len(changes) // _POINTS)
    for number, (time, size, category) in enumerate(changes):
        now[category] += size
        total += size
        is_peak = total > peak
        if is_peak:
            peak, at_peak, peak_time = total, dict(now), time
        if number % every == 0 or number == len(changes) - 1:
            times.append(time - first)
            for name in CATEGORIES:
                curves[name].append(now[name])
    largest = sorted((b for b in held if _is_held_from(b, peak_time)), key=lambda b: -b.bytes)[:MOST_BLOCKS]
    return MemorySummary(
        peak_bytes=peak,
        at_peak=at_peak,
        largest=tuple(Block(b.bytes, b.category, place_of(b.frames)) for b in largest),
        times_us=tuple(times),
        curves={name: tuple(curve) for name, curve in curves.items()},
    )


def _is_held_from(block: _Held, time: float) -> bool:
    """Whether a block is held right after `time`."""
    return (block.begin is None or block.begin <= time) and (block.end is None or block.end > time)


def place_of(frames: Sequence[dict[str, Any]]) -> str:
    """The innermost line that is not torch's, Lightning's or DeepSpeed's own; else the innermost."""
    for frame in [*_ours(frames), *frames[:1]]:
        return f"{frame.get('filename', '?')}:{frame.get('line', 0)} ({frame.get('name', '?')})"
    return ""


def _ours(frames: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for frame in frames:
        name = frame.get("filename", "")
        if name and not any(part in name for part in _NOT_OURS):
            yield frame
