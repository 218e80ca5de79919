"""Lightning's Accelerator for Intel's and Apple's GPUs. Which exist, and how many, the Plan has decided."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator

from shardwise import accelerator
from shardwise.plan import Plan


class _OneKind(Accelerator):
    kind: str

    def setup_device(self, device: torch.device) -> None:
        accelerator.set_device(device)

    def teardown(self) -> None:
        accelerator.empty_cache(self.kind)

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """The peaks of memory in bytes."""
        counts = accelerator.memory_counts(device)
        return {"allocated_bytes.all.peak": counts.allocated_peak, "reserved_bytes.all.peak": counts.reserved_peak}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return list(range(int(devices)))

    @classmethod
    def get_parallel_devices(cls, devices: Any) -> list[torch.device]:
        return [torch.device(cls.kind, index) for index in devices]

    @classmethod
    def auto_device_count(cls) -> int:
        return max(1, len(accelerator.device_names()))

    @classmethod
    def is_available(cls) -> bool:
        return accelerator.is_present(cls.kind)

    @classmethod
    def name(cls) -> str:
        return cls.kind


class XpuAccelerator(_OneKind):
    """Intel's GPUs, for which Lightning has none."""

    kind = "xpu"


class MpsAccelerator(_OneKind):
    """Apple's GPU. Lightning's own refuses every strategy for several processes, also where there is one process."""

    kind = "mps"


def lightning_accelerator(plan: Plan) -> str | Accelerator:
    """What Lightning's Trainer takes as `accelerator`."""
    own = {"xpu": XpuAccelerator, "mps": MpsAccelerator}.get(plan.accelerator)
    return plan.accelerator if own is None else own()
