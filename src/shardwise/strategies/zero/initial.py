"""The fp32 values that DeepSpeed's masters begin with: it would make them from the 16-bit copies, which are rounded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.distributed.collectives import gather_in_order
from shardwise.plan import Plan


class InitialValues:
    """The ranks of `group` share the values of every parameter until there are masters, so that none holds them all."""

    def __init__(self, plan: Plan, group: dist.ProcessGroup) -> None:
        self.group = group
        self.sharded_alike = plan.zero_stage == 3  # a rank's masters are these same shares
        # ZeRO-1 and 2 need the GPU for whole parameters, and with offloading the masters will be on the host, too.
        self.on_host = not self.sharded_alike or plan.strategy.offload_optimizer
        self._shares: dict[str, tuple[int, Tensor]] = {}  # name → elements of each share, this rank's values

    def keep(self, name: str, parameter: nn.Parameter) -> None:
        """Copy this rank's share of a parameter."""
        size = -(-parameter.numel() // self.group.size())
        values = parameter.detach().flatten()[size * self.group.rank() :][:size]
        self._shares[name] = size, values.to("cpu" if self.on_host else values.device, copy=True)

    def fill(self, masters: Iterator[tuple[str, int, Tensor]], trained: set[str], device: torch.device) -> None:
        """Copy the values into this rank's `masters` (name, first element, storage), and forget them. Collective.

        `trained`: the names of all parameters that have masters. `device`: the group's.
        """
        mine = {name: (start, master) for name, start, master in masters}
        while self._shares:
            name = next(iter(self._shares))  # in the same order on every rank
            size, values = self._shares.pop(name)
            begin = size * self.group.rank()
            if name in trained and not self.sharded_alike:
                begin, values = 0, gather_in_order(self.group, F.pad(values.to(device), (0, size - values.numel())))
            if name in mine:
                start, master = mine[name]
                master.copy_(values[start - begin : start - begin + master.numel()])
