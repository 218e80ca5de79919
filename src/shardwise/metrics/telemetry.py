"""Looks at a rank's GPU and host every second, in a thread that no step waits for, and adds up what it sees."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shardwise.accelerator import uuid_and_pci_address
from shardwise.metrics.meter import Shown
from shardwise.metrics.nvml import GPU_VALUES, HOST_VALUES, Calls, GpuError, Nvml, Reader, Reading
from shardwise.run_dir.files import ENERGY, read_json, write_whole

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


# Reads what a rank takes of its host, and what the host has left, from /proc.

_GIB = 2.0**30


class Host:
    """The node of this rank, and this rank's process."""

    name = "/proc"

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self.proc, self.calls = proc, Calls()

    def open(self) -> None:
        """There is nothing to open."""

    def read(self) -> Reading:
        reading = Reading()
        reading.rates["host/rank_cpu_cores"] = time.process_time()
        self.calls("the memory of this process", self._read_process, reading)
        self.calls("the node's memory", self._read_memory, reading)
        self.calls("the node's cores", self._read_cores, reading)
        return reading

    def _read_process(self, reading: Reading) -> None:
        pages = int((self.proc / "self/statm").read_text().split()[1])
        reading.levels["host/rank_memory_gib"] = pages * os.sysconf("SC_PAGE_SIZE") / _GIB

    def _read_memory(self, reading: Reading) -> None:
        lines = (self.proc / "meminfo").read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        reading.levels["host/memory_available_gib"] = kib * 1024 / _GIB

    def _read_cores(self, reading: Reading) -> None:
        """The seconds that all cores were busy, divided by their number."""
        lines = (self.proc / "stat").read_text().splitlines()
        cores = sum(line.startswith("cpu") for line in lines) - 1
        user, nice, system, _idle, _waiting, *interrupts = map(int, lines[0].split()[1:8])
        ticks = user + nice + system + sum(interrupts)
        reading.rates["host/cpu_busy"] = ticks / os.sysconf("SC_CLK_TCK") / cores

    def close(self) -> None:
        """There is nothing to close."""


# Adds up the energy that the GPUs of a run have taken since its first start, in `energy.json`.

_SECONDS = 10.0  # between two writes: a process that is killed loses no more than this
_JOULES_PER_KWH = 3.6e6


class Energy:
    """The joules of all GPUs and the loss weight (tokens, samples) of the steps that they were for.

    Steps that were lost in a crash and made again count twice, in both numbers. Rank 0 keeps this.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / ENERGY
        self.joules = self.weight = 0.0
        self._weight_before = 0.0  # of earlier processes
        self._written = 0.0

    def read(self) -> None:
        """Take up what earlier processes of the run have written."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            earlier = read_json(self.path)
            self.joules, self._weight_before = float(earlier["joules"]), float(earlier["loss_weight"])

    def add(self, joules: float, weight: float) -> None:
        """`joules`: of all GPUs since the last call. `weight`: of all steps of this process so far."""
        self.joules += joules
        self.weight = self._weight_before + weight
        if time.monotonic() - self._written > _SECONDS:
            self.write()

    def write(self) -> None:
        """Write the sum, if there is any: a run on the CPU has none."""
        if not self.joules:
            return
        self._written = time.monotonic()
        with suppress(OSError):  # a folder that cannot be written to is reported at the next save
            numbers = {"joules": round(self.joules, 1), "loss_weight": self.weight}
            write_whole(self.path, json.dumps(numbers) + "\n", synced=False)

    @property
    def kwh(self) -> float | None:
        """None: no GPU has told its energy."""
        return self.joules / _JOULES_PER_KWH or None

    @property
    def joules_per_weight(self) -> float | None:
        return self.joules / self.weight if self.joules and self.weight else None
