"""What a look at a rank's GPU and host gives: names, kinds of numbers, and calls that may fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardwise.metrics.rank_values import Shown

# The names of a GPU's numbers, and how they appear in metrics.csv. Shares are between 0 and 1.
GPU_VALUES: dict[str, Shown] = {
    "gpu/power_watts": "spread",
    "gpu/energy_joules": "spread",  # since the row before
    "gpu/sm_clock_mhz": "spread",
    "gpu/temperature_celsius": "spread",
    "gpu/memory_temperature_celsius": "spread",
    # The share of the time in which the clock was held down, by the reason. A GPU at its power limit is at work as it
    # should be. The driver's counter for low utilization is left out: such a GPU has too little to do.
    "gpu/held_down_by_power": "spread",
    "gpu/held_down_by_heat": "spread",
    "gpu/held_down_by_sync_boost": "spread",
    "gpu/held_down_by_board_limit": "spread",
    "gpu/held_down_by_reliability": "spread",
    "gpu/held_down_by_power_brake": "spread",
    "gpu/held_down_by_hardware": "spread",  # hardware slowdown, its heat or the power brake, whenever it was looked at
    "gpu/utilization": "spread",  # the share of the time with any kernel: waiting for other ranks counts
    "gpu/sm_active": "spread",
    "gpu/sm_occupancy": "spread",
    "gpu/tensor_active": "spread",
    "gpu/dram_active": "spread",
    "gpu/nvlink_sent_bytes_per_second": "spread",
    "gpu/nvlink_received_bytes_per_second": "spread",
    "gpu/pcie_sent_bytes_per_second": "spread",
    "gpu/pcie_received_bytes_per_second": "spread",
    # How many there were since training began
    "gpu/xid_errors": "largest",
    "gpu/ecc_corrected_errors": "largest",
    "gpu/ecc_uncorrected_errors": "largest",
    "gpu/remapped_rows": "largest",
}

HOST_VALUES: dict[str, Shown] = {
    "host/rank_cpu_cores": "largest",  # the cores that this rank's own process keeps busy
    "host/rank_memory_gib": "largest",
    "host/cpu_busy": "largest",  # the share of the node's cores that anything keeps busy
    "host/memory_available_gib": "spread",  # of the node
}


@dataclass(frozen=True)
class GpuError:
    """An error that a GPU has just reported."""

    kind: str  # "xid" or "ecc"
    text: str  # what happened, without the rank and the GPU
    data: dict[str, Any]


@dataclass
class Reading:
    """What one look has given. A number whose call failed is left out."""

    levels: dict[str, float] = field(default_factory=dict)  # as they are now: a row has their mean
    rates: dict[str, float] = field(default_factory=dict)  # counters: a row has how much they grow in a second
    sums: dict[str, float] = field(default_factory=dict)  # counters: a row has how much they grew since the row before
    changes: dict[str, float] = field(default_factory=dict)  # counters: a row has how much they grew in the training
    errors: list[GpuError] = field(default_factory=list)


class ErrorCounts:
    """Notes how often a GPU has counted errors, and what is new since the look before."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}

    def note(self, reading: Reading, name: str, count: int, what: str) -> None:
        """Put a count into `reading`, with a GpuError if it has grown. `what` was counted, in words."""
        reading.changes[name] = count
        new = count - self._before.get(name, count)
        if new > 0 and name != "gpu/ecc_corrected_errors":  # a corrected error has changed no number
            reading.errors.append(GpuError("ecc", f"{new} new {what}", {"value": name, "new": new}))
        self._before[name] = count


class Reader(Protocol):
    """Looks at one device. All calls come from one thread; each may fail, or never come back."""

    name: str  # of the library that answers
    calls: Calls

    def open(self) -> None: ...

    def read(self) -> Reading: ...

    def close(self) -> None: ...


class Calls:
    """Makes calls that may fail. One that has failed is not made again, and its failure is reported once."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}  # what the call is for → why it failed
        self._reported = 0

    def __call__(self, purpose: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's result; None: it fails, now or before."""
        if purpose in self.failed:
            return None
        try:
            return function(*arguments)
        except Exception as error:
            self.drop(purpose, error)
            return None

    def drop(self, purpose: str, reason: object) -> None:
        self.failed.setdefault(purpose, str(reason).strip() or type(reason).__name__)

    def new_failures(self) -> list[str]:
        """The failures since the last call, in words."""
        found = [f"{purpose} ({reason})" for purpose, reason in self.failed.items()][self._reported :]
        self._reported = len(self.failed)
        return found
