"""Derives a seed for each purpose, and saves and restores the random streams of this process."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

from shardwise import accelerator


def derived_seed(seed: int, *purpose: object) -> int:
    """A different seed for each `purpose`, the same on every platform."""
    digest = hashlib.sha256("/".join(map(str, (seed, *purpose))).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_streams(seed: int) -> None:
    """Seed the streams of torch, Python and NumPy: a module or its data may draw from each of them."""
    torch.manual_seed(seed)
    seed_host(seed)


def seed_host(seed: int) -> None:
    """Seed the streams of the host alone. It takes microseconds."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of this process's random streams: torch on the host and on `device`, Python, and NumPy if imported."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type != "cpu":
        state[device.type] = accelerator.random_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if device.type != "cpu" and device.type in state:
        accelerator.set_random_state(state[device.type], device)
    if "numpy" in state:
        import numpy

        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
