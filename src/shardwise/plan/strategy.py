"""The Plan's strategy, with the options of its engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.plan.capabilities import STRATEGIES, Capabilities


@dataclass(frozen=True)
class Strategy:
    name: str  # a row of plan/capabilities.py
    timeout_minutes: float
    find_unused_parameters: bool = False
    bucket_cap_mb: int = 25
    reshard_after_forward: bool | int = True  # N: the size of the groups that keep a unit's parameters
    defer_gradient_sync: bool = False
    offload_optimizer: bool = False
    offload_parameters: bool = False
    forward_prefetch_units: int | None = None  # None: the order of FSDP2's own
    backward_prefetch_units: int | None = None
    symmetric_memory: bool | None = False  # None: the set-up tries whether GPUs can share memory
    context_parallel_method: Literal["heads", "keys"] | None = None  # None: every rank computes whole sequences
    pipeline_schedule: str = "1f1b"
    pipeline_chunks: int = 1  # stages of a rank
    pipeline_split: tuple[int, ...] | None = None  # units of each stage; None: cut by their FLOPs
    reduce_bucket_elements: int = 25_000_000
    overlap_comm: bool = True  # on GPUs
    allgather_bucket_elements: int = 25_000_000
    prefetch_bucket_elements: int = 50_000_000
    persistence_threshold_elements: int = 100_000
    max_live_elements: int = 1_000_000_000
    max_reuse_distance_elements: int = 1_000_000_000
    sub_group_elements: int = 1_000_000_000

    @property
    def capabilities(self) -> Capabilities:
        return STRATEGIES[self.name]

    @property
    def zero_stage(self) -> int:
        """The stage 1 to 3 under DeepSpeed, else 0. It is for `strategies/`; others ask for what can be done."""
        return len(self.capabilities.shards) if self.capabilities.owns_step else 0
