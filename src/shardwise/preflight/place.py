"""Knows which rank this is, its time limits, and how it reaches the other ranks. No torch on import."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

STARTED = time.monotonic()  # about when this process began


@dataclass(frozen=True)
class Limits:
    """Seconds since this process began."""

    arrive: float = 60.0  # by then every rank has imported torch, and every node has been inspected
    total: float = 80.0  # then all that has been measured is judged
    grace: float = 3.0  # after a first sign of trouble the others get this time to report theirs


@dataclass(frozen=True)
class Place:
    rank: int
    local_rank: int
    world: int
    devices: int  # the number of ranks in a node

    @staticmethod
    def read(environ: Mapping[str, str] = os.environ) -> Place:
        words = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        return Place(*(int(environ[word]) for word in words))

    @property
    def node(self) -> int:
        return self.rank // self.devices

    @property
    def nodes(self) -> int:
        return self.world // self.devices


def spent() -> float:
    """Seconds since this process began."""
    return time.monotonic() - STARTED


def left(until: float) -> float:
    """Seconds that are left until `until`, which counts from the start of this process."""
    return max(0.01, until - spent())


def connect(place: Place, seconds: float) -> Store:
    """Connect to the store. Each thread needs a client of its own: one that waits would block the other."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    # With this variable torch says that the launcher has a store already
    hosts = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=hosts, wait_for_workers=False,
        timeout=timedelta(seconds=left(seconds)), multi_tenant=True,
    )  # fmt: skip
    return PrefixStore(f"preflight-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
