"""What GPUs feel while other processes use them: power, clocks, heat, from NVML, in threads of this process."""

from __future__ import annotations

import hashlib
from statistics import mean
from typing import Any

import torch

from shardwise.accelerator import uuid_and_pci_address
from shardwise.metrics.telemetry import Telemetry, build_readers, gpu_of
from shardwise.preflight.node_report import read_gpus

SECONDS = 0.5  # between two looks


class GpuWatch:
    """Means over the GPUs and over the time between `begin` and `end`. Without GPUs it sees nothing."""

    def __init__(self, accelerator: str, count: int) -> None:
        devices = [torch.device("cuda", number) for number in range(count if accelerator == "cuda" else 0)]
        self._threads = [Telemetry(build_readers(gpu_of(device)), SECONDS, lambda error: None) for device in devices]
        for thread in self._threads:
            thread.start()

    def begin(self) -> None:
        for thread in self._threads:
            thread.take()

    def end(self) -> dict[str, float]:
        seen = [thread.take() for thread in self._threads]
        names = {name for values in seen for name in values if name.startswith("gpu/")}
        means = {name: mean(values[name] for values in seen if name in values) for name in sorted(names)}
        return {name.removeprefix("gpu/"): round(value, 4) for name, value in means.items()}

    def stop(self) -> None:
        for thread in self._threads:
            thread.stop()


def describe_gpus(accelerator: str, count: int) -> dict[str, Any]:
    """Which GPUs these are, so that a reader sees what was measured on the same ones, and how much power they may take.
    The digests of their serial numbers tell them apart and nothing else."""
    if accelerator != "cuda":
        return {"digests": [], "power_limit_watts": []}
    found = [uuid_and_pci_address(torch.device("cuda", number)) for number in range(count)]
    return {
        "digests": [hashlib.sha256(one[0].encode()).hexdigest()[:8] for one in found if one],
        "power_limit_watts": [gpu.power_limit_w for gpu in read_gpus()[0][:count]],
    }
