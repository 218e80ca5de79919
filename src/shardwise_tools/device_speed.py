"""Measures how fast one device is: its memory, and products of matrices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise import accelerator
from shardwise.config.groups import ClusterConfig
from shardwise.plan.hardware import is_gpu
from shardwise.preflight.measure import seconds_of
from shardwise_tools.machine import Speed

_WARM_UP_SECONDS = 0.3  # the clocks of an idle GPU are low
_TIMES = 20


def measure_all(clusters: Sequence[ClusterConfig]) -> list[Speed]:
    """Measure each device that torch sees; the CPU where it sees none. `clusters`: machines whose figures are known."""
    if not accelerator.is_present("cuda"):
        return _measure(torch.device("cpu"), "CPU", None)
    speeds = []
    for number, name in enumerate(accelerator.device_names()):
        known = next((cluster for cluster in clusters if cluster.gpu and is_gpu(cluster.gpu, name)), None)
        speeds += _measure(torch.device("cuda", number), f"{number} {name}", known)
        accelerator.empty_cache("cuda")
    return speeds


def _measure(device: torch.device, name: str, known: ClusterConfig | None) -> list[Speed]:
    on_cpu = device.type == "cpu"
    accelerator.set_device(device)
    bandwidth = _copy_bandwidth(device, (64 if on_cpu else 1024) * 2**20)
    size, dtype = (1024, torch.float32) if on_cpu else (8192, torch.bfloat16)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    flops = 2 * size**3 / _seconds(device, lambda: a @ b) / 1e12
    peak = None if known is None else known.peak_tflops.bf16
    most = None if known is None else known.memory_gb_per_second
    words = "fp32 products of matrices (short: for comparing CPUs)" if on_cpu else "bf16 products of matrices"
    return [Speed(name, "copies in its memory, read and written", bandwidth, "GB/s", most),
            Speed(name, words, flops, "TFLOP/s", peak)]  # fmt: skip


def _copy_bandwidth(device: torch.device, bytes_: int) -> float:
    """In 10^9 bytes a second: each byte is read and written."""
    source = torch.ones(bytes_, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * bytes_ / _seconds(device, lambda: target.copy_(source)) / 1e9


def _seconds(device: torch.device, operation: Callable[[], Any]) -> float:
    """The time of one operation on a device that is warm."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < _WARM_UP_SECONDS:
        operation()
        accelerator.synchronize(device)
    return seconds_of(operation, device, _TIMES)
