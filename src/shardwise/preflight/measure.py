"""Times transfers between ranks and checks their sums, and times one device. Bandwidths are in 10^9 bytes a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shardwise import accelerator
from shardwise.preflight.pairs import Pair

# Checks sums and times transfers between ranks that have all arrived. Bandwidths are in 10^9 bytes a second.

At = Callable[[str], None]  # reports, in words, what the rank does next


@dataclass(frozen=True)
class Sizes:
    """Sizes in bytes, and the number of timed transfers.

    `whole`: the size of the buffer. It is summed, or half of it is sent and half received. `pilot`: the size of a first
    transfer, which shows whether the whole would take too long. With 256 MiB eight H200 reach 0.96 of the bandwidth
    that they reach with 1 GiB.
    """

    whole: int
    pilot: int
    times: int


GPU = Sizes(whole=256 * 2**20, pilot=8 * 2**20, times=20)
CPU = Sizes(whole=4 * 2**20, pilot=2**18, times=10)
_WARM_UP = 5  # so many whole transfers are not timed: the clocks of an idle GPU are low
_SECONDS = 2.0  # measuring one bandwidth may take this long; over a slower link the pilot's bandwidth counts


class Measures:
    """Measures what one rank exchanges with the others, in one buffer of memory."""

    def __init__(self, rank: int, devices: int, device: torch.device) -> None:
        """`devices`: the number of ranks in a node."""
        self.rank, self.devices, self.device = rank, devices, device
        self.sizes = GPU if accelerator.has_streams(device) else CPU
        self.buffer = torch.empty(self.sizes.whole // 4, dtype=torch.float32, device=device)

    @contextmanager
    def group(self, store: Store, rank: int, ranks: int, seconds: float) -> Iterator[None]:
        """Make the process group of `ranks` ranks. `seconds`: the time after which gloo or NCCL gives up."""
        dist.init_process_group(
            accelerator.backend(self.device.type), store=store, rank=rank, world_size=ranks,
            timeout=timedelta(seconds=seconds), device_id=self.device if accelerator.has_streams(self.device) else None,
        )  # fmt: skip
        yield  # after an error the group is not destroyed: that may wait for ranks that are lost
        self.meet()  # no rank leaves while another still receives
        dist.destroy_process_group()

    def meet(self) -> None:
        """Wait until every rank of the group is here."""
        dist.all_reduce(torch.zeros(1, device=self.device))
        accelerator.synchronize(self.device)

    def check_sum(self, ranks: range) -> tuple[int, int]:
        """Count the wrong values among those that this rank gave, and among the sums that it got.

        The values are integers whose sums float32 holds exactly, for up to 65,536 ranks.
        """
        self.fill(self.rank)
        given = self._unlike(_factor(self.rank))
        dist.all_reduce(self.buffer)
        return given, self._unlike(sum(map(_factor, ranks)))

    def fill(self, rank: int) -> None:
        self.buffer.view(-1, 4).copy_(self._pattern(_factor(rank)))

    def _pattern(self, factor: int) -> torch.Tensor:
        return torch.tensor([1.0, 2.0, 3.0, 4.0], device=self.device) * factor

    def _unlike(self, factor: int) -> int:
        return int((self.buffer.view(-1, 4) != self._pattern(factor)).sum().item())

    def all_reduce_bandwidth(self) -> float:
        """The bus bandwidth as nccl-tests defines it: 2 (n - 1) / n * bytes / seconds for n ranks."""
        self.buffer.zero_()  # repeated sums of other numbers would overflow float32
        n, sizes = dist.get_world_size(), self.sizes
        part = self.buffer[: sizes.pilot // 4]
        dist.all_reduce(part)  # the first call connects the ranks
        slowest = torch.tensor([self._seconds(lambda: dist.all_reduce(part), 3)], device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        amount, seconds = sizes.pilot, float(slowest.item())
        if self._has_time_for(seconds):
            self._seconds(lambda: dist.all_reduce(self.buffer), _WARM_UP)
            amount, seconds = sizes.whole, self._seconds(lambda: dist.all_reduce(self.buffer), sizes.times)
        return 2 * (n - 1) / n * amount / seconds / 1e9

    def pairs(self, rounds: list[list[Pair]], unit: int, size: int, at: At, names: list[str]) -> dict[int, float]:
        """The bandwidth in each direction between this rank and its counterpart in each other unit.

        All pairs of a round exchange at the same time. A unit is `size` consecutive ranks, a node or a GPU, and `names`
        has its name.
        """
        found = {}
        for number, pairs in enumerate(rounds, 1):
            other = next((a if b == unit else b for a, b in pairs if unit in (a, b)), None)
            label = f"round {number} of {len(rounds)}"
            at(f"{label}: before it")
            self.meet()
            at(f"{label}: the exchange with {'nobody' if other is None else names[other]}")
            if other is not None:
                found[other] = self._exchange_bandwidth(other * size + self.rank % size)
        at("the end of the rounds")
        return found

    def _exchange_bandwidth(self, partner: int) -> float:
        out, into = self.buffer.chunk(2)

        def exchange(values: int) -> None:
            both = [dist.P2POp(dist.isend, out[:values], partner), dist.P2POp(dist.irecv, into[:values], partner)]
            for work in dist.batch_isend_irecv(both):
                work.wait()

        pilot = self.sizes.pilot // 4
        exchange(pilot)  # the first call connects the ranks
        seconds, values = self._seconds(lambda: exchange(pilot), 2), pilot
        out[0] = seconds
        exchange(1)  # both ranks use the longer of their times, so that they decide alike
        seconds = max(seconds, float(into[0].item()))
        if self._has_time_for(seconds):
            values = len(out)
            self._seconds(lambda: exchange(values), _WARM_UP)
            seconds = self._seconds(lambda: exchange(values), self.sizes.times)
        return 4 * values / seconds / 1e9

    def _has_time_for(self, pilot_seconds: float) -> bool:
        return pilot_seconds * self.sizes.whole / self.sizes.pilot * (self.sizes.times + _WARM_UP) < _SECONDS

    def _seconds(self, operation: Callable[[], Any], times: int) -> float:
        return seconds_of(operation, self.device, times)


def _factor(rank: int) -> int:
    return rank % 64 + 1


# Times what a device does.


def seconds_of(operation: Callable[[], Any], device: torch.device, times: int) -> float:
    """The time of one operation, of so many that are timed.

    On a GPU it is the median; on a CPU, whose cores also do other work, the least.
    """
    if accelerator.has_streams(device):
        events = [accelerator.new_event(device, timed=True) for _ in range(times + 1)]
        events[0].record()
        for event in events[1:]:
            operation()
            event.record()
        events[-1].synchronize()
        return float(median(a.elapsed_time(b) / 1e3 for a, b in pairwise(events)))
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        operation()
        accelerator.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
