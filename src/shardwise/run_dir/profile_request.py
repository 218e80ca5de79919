"""How `shardwise profile` and a run talk: by two small files in the run's folder, looked at once a second."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from shardwise.run_dir.files import PROFILE_ANSWER, PROFILE_REQUEST, read_json, write_whole

MOST_STEPS = 100
_LOOK_SECONDS = 1.0

State = Literal["seen", "begun", "done", "failed"]


@dataclass(frozen=True)
class Request:
    """A profile that somebody asks a run for."""

    steps: int = 1  # at most MOST_STEPS
    all_ranks: bool = False  # else rank 0 alone
    stacks: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    time: float = field(default_factory=time.time)

    @property
    def number(self) -> int:
        """The request as a number below 2**12, which travels to all ranks; its id and time stay with rank 0."""
        return self.steps * 4 + 2 * self.all_ranks + self.stacks

    @staticmethod
    def of_number(number: int) -> Request:
        return Request(number // 4, bool(number & 2), bool(number & 1), id="")


@dataclass(frozen=True)
class Answer:
    """How far the run is with the request `id`. `text`: the profile's folder, or why there is none."""

    id: str
    state: State
    text: str = ""


def write_request(run_dir: Path, request: Request) -> None:
    write_whole(run_dir / PROFILE_REQUEST, json.dumps(asdict(request)) + "\n")


def read_request(run_dir: Path) -> Request | None:
    """The request that waits; None: there is none, or it cannot be read."""
    with suppress(OSError, ValueError, TypeError):
        return Request(**read_json(run_dir / PROFILE_REQUEST))
    return None


def remove_request(run_dir: Path, request: Request) -> None:
    """Remove a request, unless another one has taken its place."""
    found = read_request(run_dir)
    if found is not None and found.id == request.id:
        with suppress(OSError):
            (run_dir / PROFILE_REQUEST).unlink(missing_ok=True)


def write_answer(run_dir: Path, answer: Answer) -> None:
    with suppress(OSError):  # a full disk makes itself known at the next save
        write_whole(run_dir / PROFILE_ANSWER, json.dumps(asdict(answer)) + "\n")


def read_answer(run_dir: Path, request: Request) -> Answer | None:
    """What the run has answered to `request`; None: nothing yet."""
    with suppress(OSError, ValueError, TypeError):
        answer = Answer(**read_json(run_dir / PROFILE_ANSWER))
        return answer if answer.id == request.id else None
    return None


class RequestWatch:
    """Looks for requests in a thread of rank 0, and hands each on once."""

    def __init__(self, run_dir: Path, hand_on: Callable[[Request], None]) -> None:
        self.run_dir, self.hand_on = run_dir, hand_on
        self._known: str | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="profile-requests", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            request = read_request(self.run_dir)
            if request is None or request.id == self._known:
                continue
            self._known = request.id
            write_answer(self.run_dir, Answer(request.id, "seen"))
            self.hand_on(request)
