"""Sums that are checked and transfers that are timed, between ranks that have all arrived. Bandwidths in 10^9 bytes a
second."""

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

from shardwise.preflight.rounds import Pair

At = Callable[[str], None]  # told what comes next


@dataclass(frozen=True)
class Sizes:
    """In bytes. `whole`: of the one buffer, which is summed; half of it is sent and half received. `pilot`: of the
    transfer that tells whether the whole would take too long. At 256 MiB eight H200 come to 0.96 of what they reach
    with 1 GiB."""

    whole: int
    pilot: int
    times: int


GPU = Sizes(whole=256 * 2**20, pilot=8 * 2**20, times=20)
CPU = Sizes(whole=4 * 2**20, pilot=2**18, times=10)
_WARM_UP = 5  # transfers of the whole that do not count: the clocks of an idle GPU are low
_SECONDS = 2.0  # that one bandwidth may take; over a slower link the pilot's stands


class Measures:
    """A rank's own, with what the others are told in between."""

    def __init__(self, rank: int, devices: int, device: torch.device) -> None:
        """`devices`: ranks a node. One buffer is all the memory that is taken."""
        self.rank, self.devices, self.device = rank, devices, device
        self.sizes = GPU if device.type == "cuda" else CPU
        self.buffer = torch.empty(self.sizes.whole // 4, dtype=torch.float32, device=device)

    @contextmanager
    def group(self, store: Store, rank: int, ranks: int, seconds: float) -> Iterator[None]:
        """The process group of `ranks`. `seconds`: after which gloo, and NCCL, give up by themselves."""
        cuda = self.device.type == "cuda"
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=seconds),
            device_id=self.device if cuda else None,
        )  # fmt: skip
        yield  # an error leaves it as it is: to take a broken one down may wait for those that are lost
        self.meet()  # nobody goes while another is still being sent to
        dist.destroy_process_group()

    def meet(self) -> None:
        """Every rank of the group is here."""
        dist.all_reduce(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def check_sum(self, ranks: range) -> tuple[int, int]:
        """How many of the values that this rank gave, and of the sums that it got, are not what they must be.

        The sums are of integers that float32 holds exactly, for up to 65,536 ranks.
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
        """Bus bandwidth, as nccl-tests has it: 2 (n - 1) / n * bytes / seconds for n ranks."""
        self.buffer.zero_()  # a sum of sums would leave float32
        n, sizes = dist.get_world_size(), self.sizes
        part = self.buffer[: sizes.pilot // 4]
        dist.all_reduce(part)  # connects
        slowest = torch.tensor([self._seconds(lambda: dist.all_reduce(part), 3)], device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        amount, seconds = sizes.pilot, float(slowest.item())
        if self._has_time_for(seconds):
            self._seconds(lambda: dist.all_reduce(self.buffer), _WARM_UP)
            amount, seconds = sizes.whole, self._seconds(lambda: dist.all_reduce(self.buffer), sizes.times)
        return 2 * (n - 1) / n * amount / seconds / 1e9

    def pairs(self, rounds: list[list[Pair]], unit: int, size: int, at: At, names: list[str]) -> dict[int, float]:
        """Unit → what this rank and its counterpart there exchange, in each direction, while all other pairs of the
        round do the same. A unit: `size` ranks in a row, a node or a GPU, called by `names`."""
        found = {}
        for number, pairs in enumerate(rounds, 1):
            other = next((a if b == unit else b for a, b in pairs if unit in (a, b)), None)
            where = f"round {number} of {len(rounds)}"
            at(f"{where}: before it")
            self.meet()
            at(f"{where}: the exchange with {'nobody' if other is None else names[other]}")
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
        exchange(pilot)  # connects
        seconds, values = self._seconds(lambda: exchange(pilot), 2), pilot
        out[0] = seconds
        exchange(1)  # so that both decide alike
        seconds = max(seconds, float(into[0].item()))
        if self._has_time_for(seconds):
            values = len(out)
            self._seconds(lambda: exchange(values), _WARM_UP)
            seconds = self._seconds(lambda: exchange(values), self.sizes.times)
        return 4 * values / seconds / 1e9

    def _has_time_for(self, pilot_seconds: float) -> bool:
        return pilot_seconds * self.sizes.whole / self.sizes.pilot * (self.sizes.times + _WARM_UP) < _SECONDS

    def _seconds(self, operation: Callable[[], Any], times: int) -> float:
        """Of one: the median on a GPU; the quickest on a CPU, whose cores are others' in between."""
        if self.device.type == "cuda":
            events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]  # type: ignore[no-untyped-call]
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
            seconds.append(time.perf_counter() - begin)
        return min(seconds)


def _factor(rank: int) -> int:
    return rank % 64 + 1
