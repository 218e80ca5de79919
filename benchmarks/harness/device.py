"""A rank's device: waiting for it, and its memory."""

from __future__ import annotations

import gc
import os
import shutil

import torch


def device_of(accelerator: str) -> torch.device:
    """The device of this rank; of a process that is no rank, the first one."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if accelerator == "cuda" else torch.device("cpu")


def two_and_all() -> list[int]:
    """On how many GPUs of this machine a benchmark runs, one after the other, where nothing is said. Without GPUs: two
    processes."""
    there = torch.cuda.device_count() or 2
    return sorted({min(2, there), there})


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    """Gives back what nothing refers to, and measures the peaks from here on."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.init()  # in a process that has not used the GPU yet, resetting the peaks is an error
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peaks_gib(device: torch.device) -> dict[str, float]:
    """The largest memory since `free_memory`, in GiB; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "peak_allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "peak_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
    }


def shared_memory_gib() -> float | None:
    """What loader workers can hand over at a time."""
    try:
        return round(shutil.disk_usage("/dev/shm").total / 2**30, 1)
    except OSError:
        return None
