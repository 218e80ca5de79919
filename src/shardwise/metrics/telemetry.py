"""Looks at a rank's GPU and host every second, in a thread that no step waits for, and adds up what it sees."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from shardwise.accelerator import uuid_and_pci_address
from shardwise.metrics.host import Host
from shardwise.metrics.nvml import Nvml
from shardwise.metrics.rank_values import Shown
from shardwise.metrics.reading import GPU_VALUES, HOST_VALUES, GpuError, Reader, Reading

_SILENCE_SECONDS = 15.0  # after so long without a look, the numbers are too old to be written
_JOIN_SECONDS = 1.0  # the end of training waits no longer for a look that is under way


def telemetry_values(accelerator: str) -> dict[str, Shown]:
    """The names of what telemetry measures on a Plan's `accelerator`, the same on every rank."""
    return (GPU_VALUES if accelerator == "cuda" else {}) | HOST_VALUES


@dataclass(frozen=True)
class Gpu:
    """How other libraries than torch find a rank's GPU."""

    uuid: str  # without a prefix
    pci_address: str  # 00000000:1b:00.0

    @property
    def label(self) -> str:
        """What nvidia-smi and DCGM call it."""
        return f"GPU-{self.uuid}"


def gpu_of(device: torch.device) -> Gpu | None:
    """The GPU that torch calls `device`; None: it is the CPU."""
    found = uuid_and_pci_address(device)
    return None if found is None else Gpu(*found)


def build_readers(gpu: Gpu | None) -> list[Reader]:
    """What looks at this rank's devices. Nothing is opened here."""
    readers: list[Reader] = [Host()]
    if gpu is not None:
        readers.append(Nvml(gpu.uuid, gpu.pci_address))
    return readers


@dataclass
class _Sums:
    """What was seen since the last row."""

    levels: dict[str, list[float]] = field(default_factory=dict)
    grown: dict[str, float] = field(default_factory=dict)


class Telemetry:
    """The thread, and what it has seen. A reader that hangs or fails costs its numbers and nothing else.

    A data worker that is forked from this process has a copy of this object, and no thread.
    """

    def __init__(self, readers: Sequence[Reader], seconds: float, on_error: Callable[[GpuError], None]) -> None:
        """`on_error` is called in the thread, at once: a GPU's error may be the last thing that this process sees."""
        self._readers, self._seconds, self._on_error = list(readers), seconds, on_error
        self._stop = threading.Event()
        self._lock = threading.Lock()  # held for additions only, never during a call of a library
        self._sums = _Sums()
        self._before: dict[str, tuple[float, float]] = {}  # counter → when it was read last, and what it was
        self._first: dict[str, float] = {}  # counter → what it was at first
        self._changes: dict[str, float] = {}
        self._means: dict[str, float] = {}  # of the last row that had any
        self._notices: list[str] = []
        self._looked = time.monotonic()  # when the last look ended
        self._busy_with = ""  # the reader that is being read
        self._is_silent = False
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, which looks once more. A look that hangs is left behind: the thread ends with the process."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)

    def take(self) -> dict[str, float]:
        """The numbers since the last call. Those of the last look stand for a time in which there was none.

        A GPU's energy is left out then: the next call has all of it.
        """
        age = time.monotonic() - self._looked
        if age > max(_SILENCE_SECONDS, 5 * self._seconds):
            self._note_silence(age)
            return {}
        self._is_silent = False
        with self._lock:
            sums, self._sums = self._sums, _Sums()
            self._means = self._means | {name: sum(seen) / len(seen) for name, seen in sums.levels.items()}
            return self._means | sums.grown | self._changes

    def take_notices(self) -> list[str]:
        """What the user should know, each once."""
        with self._lock:
            notices, self._notices = self._notices, []
        return notices

    def _note_silence(self, age: float) -> None:
        if not self._is_silent:
            self._notices.append(f"{self._busy_with} has not answered for {age:.0f} s: no values until it does")
        self._is_silent = True

    def _run(self) -> None:
        self._each(lambda reader: reader.open(), "cannot be used")
        ends = False
        while self._readers:
            self._each(self._look, "failed")
            self._looked = time.monotonic()
            if ends:
                break
            ends = self._stop.wait(self._seconds)
        self._each(lambda reader: reader.close(), "did not close")

    def _each(self, call: Callable[[Reader], None], how: str) -> None:
        """Call a function with each reader. One that fails is not read any more."""
        for reader in list(self._readers):
            self._busy_with = reader.name
            try:
                call(reader)
            except Exception as error:
                self._readers.remove(reader)
                reason = f"{reader.name} {how}: {str(error).strip() or type(error).__name__}"
                with self._lock:
                    self._notices.append(f"{reason}; it gives no values")

    def _look(self, reader: Reader) -> None:
        reading, now = reader.read(), time.monotonic()
        missing = reader.calls.new_failures()
        with self._lock:
            self._add(reading, now)
            if missing:
                self._notices.append(f"{reader.name} does not give {', '.join(missing)}")
        for error in reading.errors:
            self._on_error(error)

    def _add(self, reading: Reading, now: float) -> None:
        levels = dict(reading.levels)
        for name, count in reading.rates.items():
            if (growth := self._growth(name, count, now)) is not None:
                rate = growth[0] / growth[1]
                # A share is above one by what the counter's two readings are further apart than the two looks
                is_share = "held_down" in name or name == "host/cpu_busy"
                levels[name] = min(rate, 1.0) if is_share else rate
        for name, level in levels.items():
            self._sums.levels.setdefault(name, []).append(level)
        for name, count in reading.sums.items():
            if (growth := self._growth(name, count, now)) is not None:
                self._sums.grown[name] = self._sums.grown.get(name, 0.0) + growth[0]
        for name, count in reading.changes.items():
            self._changes[name] = count - self._first.setdefault(name, count)

    def _growth(self, name: str, count: float, now: float) -> tuple[float, float] | None:
        """How much a counter has grown since the last look, and in how many seconds.

        None: this is the first look, or the counter began anew.
        """
        before = self._before.get(name)
        self._before[name] = now, count
        if before is None or count < before[1] or now <= before[0]:
            return None
        return count - before[1], now - before[0]
