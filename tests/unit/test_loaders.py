"""Windows, their scales, the training clock, and loaders that are refused; one process."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from shardwise.compose import compose
from shardwise.data.loaders import EvaluationLoader, TrainLoader
from shardwise.errors import ConfigError
from shardwise.plan import Host, Plan, make_plan
from shardwise.topology import make_topology

CPU = torch.device("cpu")


def plan(ranks: int = 1, micro: int = 2, accumulate: int = 3) -> Plan:
    words = [f"micro_batch_size={micro}", f"global_batch_size={micro * ranks * accumulate}", "accelerator=cpu"]
    made = make_plan(compose([*words, f"devices={ranks}"]).jobs[0].config, Host(cuda_devices=0, run_id="x"))
    return replace(made, topology=make_topology("ddp", 1, ranks))


def loader(samples: int = 20, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(list(range(samples)), **{"batch_size": 2, **kwargs})  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_is_whole_windows_in_order(workers: int) -> None:
    train = TrainLoader(loader(num_workers=workers), plan(), 0, CPU, None)
    assert len(train) == 9  # 20 samples: three windows of three micro-batches of two; two samples are dropped
    assert torch.cat(list(train)).tolist() == list(range(18))
    assert train.state_dict() == {"samples_consumed": 18}
    assert torch.cat(list(train)).tolist() == list(range(18)), "the next epoch starts over"


def test_ranks_split_each_global_batch() -> None:
    seen = [torch.cat(list(TrainLoader(loader(24), plan(ranks=2), rank, CPU, None))).tolist() for rank in (0, 1)]
    assert seen[0][:6] == [0, 1, 4, 5, 8, 9]
    assert seen[1][:6] == [2, 3, 6, 7, 10, 11]
    assert sorted(seen[0] + seen[1]) == list(range(24))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_goes_on_where_its_state_says(shuffle: bool) -> None:
    def fresh() -> TrainLoader:
        return TrainLoader(loader(shuffle=shuffle), plan(), 0, CPU, None)

    whole = fresh()
    two_epochs = [b.tolist() for _ in range(2) for b in whole]
    for steps in (1, 2, 3, 4):
        rest = fresh()
        rest.load_state_dict({"samples_consumed": steps * 6})
        again = [b.tolist() for _ in range(2) for b in rest]
        assert again[: len(two_epochs) - 3 * steps] == two_epochs[3 * steps :]
    assert (two_epochs[:9] == two_epochs[9:]) is not shuffle, "each epoch has an order of its own"


def test_scales_weigh_each_micro_batch_of_a_window() -> None:
    """Σ scale_i · mean_i / n is the weighted mean over the window."""
    weights = {0: 1, 2: 5, 4: 0}  # by a batch's first sample
    train = TrainLoader(loader(6), plan(), 0, CPU, lambda batch: weights[int(batch[0])])
    scales = []
    for _ in train:
        scale = train.scales.popleft()
        assert scale is not None
        scales.append(float(scale))
    assert scales == pytest.approx([3 * 1 / 6, 3 * 5 / 6, 0])
    assert train.window_weight == 6
    nothing = TrainLoader(loader(6), plan(), 0, CPU, lambda batch: 0)
    assert [float(nothing.scales.popleft()) for _ in nothing] == [0, 0, 0]  # type: ignore[arg-type]


def test_every_rank_gets_equally_many_evaluation_batches() -> None:
    for samples in (1, 3, 7, 8, 9):
        seen: list[int] = []
        counts = set()
        for rank in range(3):
            paddings: deque[bool] = deque()
            evaluation = EvaluationLoader(loader(samples), plan(ranks=3, micro=2), rank, paddings)
            batches = list(evaluation)
            counts.add(len(batches))
            assert len(batches) == len(evaluation) == len(paddings)
            seen += [int(x) for b, padding in zip(batches, paddings, strict=True) if not padding for x in b]
        assert len(counts) == 1
        assert sorted(seen) == list(range(samples))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_limit_counts_batches_of_all_ranks(ranks: int) -> None:
    seen: list[int] = []
    for rank in range(ranks):
        paddings: deque[bool] = deque()
        batches = list(EvaluationLoader(loader(9), plan(ranks=ranks, micro=2), rank, paddings, limit=3))
        seen += [int(x) for b, padding in zip(batches, paddings, strict=True) if not padding for x in b]
    assert sorted(seen) == list(range(6))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (loader(batch_size=3), ["batch_size is 3", "micro_batch_size=2", "data.batch_size"]),
        (loader(sampler=WeightedRandomSampler([1.0] * 20, 20)), ["WeightedRandomSampler", "shuffle=True or"]),
        (loader(batch_size=None), ["batch_size=None", "give it batch_size"]),
        (loader(5), ["5 samples", "global_batch_size=12", "smaller"]),
        (DataLoader(Stream(), batch_size=2), ["Stream is iterable", "2 data-parallel ranks", "__getitem__"]),
        ([1, 2, 3], ["is a list", "DataLoader"]),
    ],
)
def test_a_loader_that_cannot_be_ordered_is_refused(given: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainLoader(given, plan(ranks=2), 0, CPU, None)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_stream_is_read_on_one_rank() -> None:
    train = TrainLoader(DataLoader(Stream(), batch_size=2), plan(), 0, CPU, None)
    assert torch.cat(list(train)).tolist() == list(range(6)), "whole windows only"
    limited = EvaluationLoader(DataLoader(Stream(), batch_size=2), plan(), 0, deque(), limit=2)
    assert torch.cat(list(limited)).tolist() == list(range(4))
