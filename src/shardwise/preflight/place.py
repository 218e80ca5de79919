"""Which of the ranks this is, how long it may take, and how it reaches the others. No torch on import."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

STARTED = time.monotonic()  # this process, nearly


@dataclass(frozen=True)
class Limits:
    """Seconds since this process began."""

    arrive: float = 60.0  # every rank is there, torch imported, and every node has looked at itself
    total: float = 80.0  # whatever has been measured is judged
    grace: float = 3.0  # between a first sign of trouble and the judgement: what do the others say, who is silent?


@dataclass(frozen=True)
class Place:
    rank: int
    local_rank: int
    world: int
    devices: int  # ranks a node

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
    """Seconds until so many have passed since this process began."""
    return max(0.01, until - spent())


def connect(place: Place, seconds: float) -> Store:
    """A client of its own: what waits in one thread would hold another's up."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    # torch's word for: the launcher has one already
    hosts = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=hosts, wait_for_workers=False,
        timeout=timedelta(seconds=left(seconds)), multi_tenant=True,
    )  # fmt: skip
    return PrefixStore(f"preflight-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
