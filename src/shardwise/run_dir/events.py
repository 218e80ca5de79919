"""Records what happens in a run in `events.jsonl`, a line each: starts, saves, verdicts, the end."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.run_dir.files import EVENTS
from shardwise.run_dir.reading import parse_json, read_text
from shardwise.run_dir.secrets import redact_text


@dataclass(frozen=True)
class Event:
    """Something that happened in a run."""

    time: float  # seconds since 1970
    kind: str  # "start", "save", "verdict", "profile", "end", …
    step: int | None  # the step that the run had made; None: not known
    text: str  # a sentence for the user
    data: dict[str, Any] = field(default_factory=dict)


def append_event(run_dir: str | Path, kind: str, step: int | None, text: str, **data: Any) -> None:
    """Append an event. A full disk does not end the run, and what it takes of an event spoils no other one.

    Rank 0 or its launcher calls this; and the rank whose GPU reports an error, which may not live to tell rank 0.
    """
    line = (
        json.dumps({"time": round(time.time(), 3), "kind": kind, "step": step, "text": redact_text(text), "data": data})
        + "\n"
    )
    try:
        descriptor = os.open(Path(run_dir) / EVENTS, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            end = os.lseek(descriptor, 0, os.SEEK_END)
            is_torn = end > 0 and os.pread(descriptor, 1, end - 1) != b"\n"
            rest = b"\n" * is_torn + line.encode()
            while rest:  # in one call, which a kill cannot cut in two; a disk that is nearly full may take a part
                rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)
    except OSError as error:
        sys.stderr.write(f"shardwise: {Path(run_dir) / EVENTS} could not be written: {error.strerror}\n")


def read_events(run_dir: str | Path) -> list[Event]:
    """The events of a run, the oldest first; none where there is no file, or none that can be read, which is said.

    Lines that are damaged are left out.
    """
    try:
        lines = read_text(Path(run_dir) / EVENTS).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        sys.stderr.write(f"shardwise: {error.filename} is not read: {error.strerror}\n")
        return []
    return [event for line in lines if (event := _parse(line)) is not None]


def _parse(line: str) -> Event | None:
    try:
        event = Event(**parse_json(line))
    except (ValueError, TypeError):
        return None
    return event if _is_sound(event) else None


def _is_sound(event: Event) -> bool:
    """Whether everything is what it should be, and the time one that a calendar has."""
    typed = isinstance(event.kind, str) and isinstance(event.text, str) and isinstance(event.data, dict)
    timed = isinstance(event.time, (int, float)) and 0 <= event.time < 1e11
    return typed and timed and isinstance(event.step, (int, type(None)))
