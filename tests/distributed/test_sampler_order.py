"""A sampler that gives each rank samples of its own is refused: what a sampler gives is dealt out over the ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

from shardwise.config.compose import compose
from shardwise.data.evaluation import EvaluationLoader
from shardwise.data.loaders import TrainLoader
from shardwise.errors import ConfigError
from shardwise.plan import Host, make_plan
from tests.harness.processes import spawn


class OwnSamples(Sampler[int]):
    def __init__(self, first: int, each: int) -> None:
        self.first, self.each = first, each

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, 16, self.each))

    def __len__(self) -> int:
        return len(range(self.first, 16, self.each))


def deal_out() -> None:
    """In each rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    words = ["micro_batch_size=2", "global_batch_size=4", "accelerator=cpu", "devices=2"]
    plan = make_plan(compose(words).jobs[0].config, Host(cuda_devices=0, run_id="x"))

    def loader(sampler: Sampler[int]) -> DataLoader[Any]:
        return DataLoader(list(range(16)), batch_size=2, sampler=sampler)  # type: ignore[arg-type]

    def group() -> dist.ProcessGroup | None:
        return dist.group.WORLD

    with pytest.raises(ConfigError, match="the training loader's OwnSamples gives ranks different samples"):
        TrainLoader(loader(OwnSamples(rank, 2)), plan, rank, torch.device("cpu"), None, None, group)
    with pytest.raises(ConfigError, match="validation, test or prediction loader's OwnSamples gives ranks different"):
        EvaluationLoader(loader(OwnSamples(rank, 2)), plan, rank, deque().append, None, group)
    evaluation = EvaluationLoader(loader(OwnSamples(0, 2)), plan, rank, deque().append, None, group)
    assert torch.cat(list(evaluation)).tolist() == [[0, 2, 8, 10], [4, 6, 12, 14]][rank]
    dist.destroy_process_group()


def test_a_sampler_gives_every_rank_the_same_order(tmp_path: Path) -> None:
    spawn(2, deal_out)
