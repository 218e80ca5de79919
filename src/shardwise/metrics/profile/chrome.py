"""Reads a Chrome trace that torch.profiler wrote."""

from __future__ import annotations

import gc
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.errors import DataError
from shardwise.metrics.profile.build import Build
from shardwise.metrics.profile.trace import Step, Trace
from shardwise.run_dir.reading import read_whole

# Categories of events → what they are; older versions of torch wrote them with capital letters.
CATEGORIES = {
    "kernel": "kernel",
    "gpu_memcpy": "copy", "memcpy": "copy", "gpu_memset": "copy", "memset": "copy",
    "cuda_runtime": "launch", "cuda_driver": "launch", "runtime": "launch", "hip_runtime": "launch",
    "xpu_runtime": "launch", "privateuse1_runtime": "launch",
    "cpu_op": "operation", "operator": "operation",
    "user_annotation": "annotation",
    "python_function": "frame",
}  # fmt: skip
STEP = re.compile(r"(?:ProfilerStep|shardwise::step)\s*#\s*(\d+)$")


def read_trace(path: str | Path) -> Trace:
    """Read a Chrome trace of torch.profiler: `.json`, or `.json.gz`.

    Raises:
        DataError: the file is missing, cut short, or not such a trace.
    """
    with _collector_off():
        return _read(Path(path))


def _read(path: Path) -> Trace:
    content = _load(path)
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise DataError(f"{path} is no trace of torch.profiler: it is JSON without a list traceEvents")
    build = Build(path)
    try:
        for event in events:
            _add(build, event)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is no trace of torch.profiler: an event is malformed ({error!r})") from None
    if not build.has_events:
        raise DataError(
            f"{path} has no kernel and no operator: nothing was recorded; torch.profiler writes what can be read"
        )
    return build.trace(**_about(content if isinstance(content, dict) else {}))


@contextmanager
def _collector_off() -> Iterator[None]:
    """Python's garbage collector looks again and again through millions of objects, none of which is garbage yet: a
    third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _load(path: Path) -> Any:
    try:
        data = read_whole(path)
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        # A name that is not UTF-8 is no reason to refuse the whole trace
        return json.loads(text.decode(errors="replace"), strict=False)
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile):
            raise DataError(f"{path} is damaged: {error}") from None
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error):
        raise DataError(f"{path} is cut short: its compressed data end too early; record the profile again") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is cut short, or no JSON: {error}; record the profile again") from None


def _add(build: Build, event: dict[str, Any]) -> None:
    if event.get("ph") != "X":
        return
    kind = CATEGORIES.get(str(event.get("cat", "")).lower())
    if kind is None:
        return
    name, begin = event["name"], event["ts"] * 1000
    end, args = begin + event.get("dur", 0) * 1000, event.get("args") or {}
    link = args.get("correlation", -1)
    if kind in ("kernel", "copy"):
        lane = args.get("stream", event.get("tid", -1))
        build.add_device(name, begin, end, lane, args.get("device", event.get("pid", 0)), kind == "copy", link)
    else:
        build.add_host(kind, name, begin, end, event.get("tid", -1), link)
        if kind == "annotation" and (match := STEP.match(name)):
            build.steps.append(Step(int(match[1]), round(begin), round(end)))


def _about(content: dict[str, Any]) -> dict[str, Any]:
    """The trace's own words on where it was recorded."""
    devices = content.get("deviceProperties") or [{}]
    return {
        "device_name": str(devices[0].get("name", "")),
        "host_name": str(content.get("host_name", "")),
        "rank": (content.get("distributedInfo") or {}).get("rank"),
    }
