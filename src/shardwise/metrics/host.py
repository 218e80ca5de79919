"""Reads what a rank takes of its host, and what the host has left, from /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path

from shardwise.metrics.reading import Calls, Reading

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
