"""Windows, their scales, the training clock, samplers, streams, and loaders that are refused; one process."""

from __future__ import annotations

import pickle
import random
from collections import deque
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shardwise.config.compose import compose
from shardwise.data.evaluation import EvaluationLoader
from shardwise.data.loaders import TrainLoader
from shardwise.data.user_loader import SeededSamples, with_seeds
from shardwise.errors import ConfigError
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.plan.topology import make_topology

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
        scale = train.next_scale()
        assert scale is not None
        scales.append(float(scale))
    assert scales == pytest.approx([3 * 1 / 6, 3 * 5 / 6, 0])
    assert train.window_weight == 6
    nothing = TrainLoader(loader(6), plan(), 0, CPU, lambda batch: 0)
    assert [float(nothing.next_scale()) for _ in nothing] == [0, 0, 0]  # type: ignore[arg-type]


def test_every_rank_gets_equally_many_evaluation_batches() -> None:
    for samples in (1, 3, 7, 8, 9):
        seen: list[int] = []
        counts = set()
        for rank in range(3):
            paddings: deque[bool] = deque()
            evaluation = EvaluationLoader(loader(samples), plan(ranks=3, micro=2), rank, paddings.append)
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
        batches = list(EvaluationLoader(loader(9), plan(ranks=ranks, micro=2), rank, paddings.append, limit=3))
        seen += [int(x) for b, padding in zip(batches, paddings, strict=True) if not padding for x in b]
    assert sorted(seen) == list(range(6))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


def hard_coded(plan: Plan) -> Plan:
    """A Plan whose data has no argument for its batch size."""
    return replace(plan, data={"_target_": "tests.harness.exact_resume.Noise"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (loader(batch_size=3), ["batch_size is 3", "micro_batch_size=2", "'data.batch_size=${micro_batch_size}'"]),
        (loader(5), ["5 samples", "global_batch_size=12", "smaller"]),
        (loader(sampler=SubsetRandomSampler(range(5))), ["SubsetRandomSampler gives 5", "takes 12"]),
        (
            DataLoader(list(range(20)), batch_sampler=[[4 * i, 4 * i + 1, 4 * i + 2] for i in range(5)]),  # type: ignore[arg-type]
            ["batches of 3", "micro_batch_size=2", "give micro_batch_size=3"],
        ),
    ],
)
def test_a_loader_that_cannot_be_ordered_is_refused(given: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainLoader(given, plan(ranks=2), 0, CPU, None)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_batch_size_that_no_argument_sets_is_met_by_ours() -> None:
    with pytest.raises(ConfigError, match="make them equal: micro_batch_size=3$"):
        TrainLoader(loader(batch_size=3), hard_coded(plan()), 0, CPU, None)


def test_data_that_divides_its_batch_size_by_the_ranks_is_given_the_product() -> None:
    divides = replace(plan(ranks=2), data={"_target_": "my.Data", "batch_size": 2})
    with pytest.raises(
        ConfigError, match=r"my\.Data divides data\.batch_size=2 by the 2 ranks; give data\.batch_size=4$"
    ):
        TrainLoader(loader(batch_size=1), divides, 0, CPU, None)


class EveryThird(Sampler[int]):
    """Counts its own epochs, as some do."""

    def __init__(self, samples: int) -> None:
        self.samples, self.epoch = samples, 0

    def __iter__(self) -> Any:
        self.epoch += 1
        return iter([(3 * i + self.epoch) % self.samples for i in range(len(self))])

    def __len__(self) -> int:
        return self.samples - 7


class Buckets:
    """A batch sampler whose batches are of many sizes."""

    def __iter__(self) -> Any:
        start = int(torch.randint(3, ()))
        return iter([list(range(start + i, start + i + 1 + i % 3)) for i in range(13)])

    def __len__(self) -> int:
        return 13


OWN_ORDERS = {
    "weighted": lambda: loader(sampler=WeightedRandomSampler([1.0, 9.0] * 10, 20)),
    "weighted, with a generator": lambda: loader(
        sampler=WeightedRandomSampler([1.0, 9.0] * 10, 20, generator=torch.Generator())
    ),
    "drawn again": lambda: loader(sampler=RandomSampler(range(20), replacement=True, num_samples=24)),
    "a subset": lambda: loader(sampler=SubsetRandomSampler(range(4, 18))),
    "counts its epochs": lambda: loader(sampler=EveryThird(20)),
    "batches": lambda: DataLoader(range(20), batch_sampler=[[i, 19 - i] for i in range(10)]),  # type: ignore[arg-type]
    "batches of many sizes": lambda: DataLoader(range(20), batch_sampler=Buckets()),  # type: ignore[arg-type]
    "a data set of batches": lambda: DataLoader(torch.arange(30).reshape(-1, 2), batch_size=None, shuffle=True),  # type: ignore[arg-type]
}


def of_all_ranks(make: Any, ranks: int, accumulate: int, epochs: int = 2, start: int = 0) -> list[list[int]]:
    """Every step's micro-batches, those of all ranks in turn."""
    made = [TrainLoader(make(), plan(ranks, 2, accumulate), rank, CPU, None) for rank in range(ranks)]
    for train in made:
        train.load_state_dict({"samples_consumed": start})
    dealt = [[batch.tolist() for _ in range(epochs) for batch in train] for train in made]
    assert [train.consumed for train in made] == [start + 2 * ranks * len(dealt[0])] * ranks
    return [batch for turn in zip(*dealt, strict=True) for batch in turn]


@pytest.mark.parametrize("name", OWN_ORDERS)
def test_a_samplers_order_is_dealt_out_over_any_ranks_and_found_again(name: str) -> None:
    make = OWN_ORDERS[name]
    torch.manual_seed(1)
    alone = of_all_ranks(make, 1, 2)
    torch.manual_seed(2)  # the order is the run's seed's
    assert of_all_ranks(make, 2, 1) == alone, "two ranks see the same global batches"
    for steps in (1, 3, len(alone) // 4, len(alone) // 4 + 1):
        assert of_all_ranks(make, 2, 1, 3, 4 * steps)[: len(alone) - 2 * steps] == alone[2 * steps :], steps
    if name == "a subset":
        assert {i for batch in alone for i in batch} <= set(range(4, 18))
    if name.startswith("weighted"):
        drawn = [i for batch in alone for i in batch]
        assert sum(i % 2 for i in drawn) > len(drawn) * 0.7


def test_a_sampler_that_gives_another_order_after_a_resume_is_told() -> None:
    state = TrainLoader(OWN_ORDERS["weighted"](), plan(), 0, CPU, None).state_dict()
    other = TrainLoader(loader(sampler=WeightedRandomSampler([9.0, 1.0] * 10, 20)), plan(), 0, CPU, None)
    with pytest.raises(ConfigError, match=r"gives another order than in the run.*resume_allow=\[data\]"):
        other.load_state_dict(state)


class Doubling(DataLoader[Any]):
    """Iterates in a way of its own over its batch sampler's batches, as loaders of graphs do."""

    def __init__(self, samples: int, **kwargs: Any) -> None:
        super().__init__(range(samples), **kwargs)  # type: ignore[arg-type]

    def __iter__(self) -> Any:
        return (2 * batch for batch in super().__iter__())


def test_a_loader_of_a_class_of_its_own_stays_one() -> None:
    train = TrainLoader(Doubling(24, batch_size=2, shuffle=False), plan(ranks=2), 1, CPU, None)
    assert torch.cat(list(train)).tolist() == [2 * i for i in (2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23)]
    evaluation = EvaluationLoader(Doubling(7, batch_size=2), plan(ranks=2), 1, deque().append)
    assert torch.cat(list(evaluation)).tolist() == [4, 6, 12]
    assert len(train.dataset) == 24 and evaluation.batch_size == 2, "what a module reads of its loader"
    with pytest.raises(AttributeError, match="no_such"):
        _ = train.no_such


def test_a_padding_batch_is_as_large_as_a_full_one() -> None:
    for samples, sizes in ((9, [4, 4]), (5, [4, 4]), (3, [3, 3])):
        paddings: deque[bool] = deque()
        batches = list(EvaluationLoader(loader(samples, batch_size=4), plan(ranks=2), 1, paddings.append))
        assert [len(batch) for batch, padding in zip(batches, paddings, strict=True) if padding] == sizes[1:] * (
            samples != 5
        )
        assert all(int(i) < samples for batch in batches for i in batch)


def test_evaluation_keeps_to_the_loaders_own_sampler() -> None:
    def seen(given: DataLoader[Any], ranks: int = 2) -> list[int]:
        found = []
        for rank in range(ranks):
            paddings: deque[bool] = deque()
            for batch in (evaluation := EvaluationLoader(given, plan(ranks=ranks), rank, paddings.append)):
                if not paddings[-1]:
                    found += batch.tolist()
            assert len(evaluation) == len(paddings)
        return sorted(found)

    assert seen(loader(9)) == seen(loader(9, shuffle=True)) == list(range(9))
    assert seen(loader(9, drop_last=True)) == list(range(8))
    assert seen(loader(20, sampler=SubsetRandomSampler([3, 5, 7]))) == [3, 5, 7]
    assert seen(DataLoader(range(20), batch_sampler=[[1], [2, 3], [4, 5, 6]])) == [1, 2, 3, 4, 5, 6]  # type: ignore[arg-type]
    assert seen(DataLoader(torch.arange(6).reshape(3, 2), batch_size=None)) == list(range(6))  # type: ignore[arg-type]


class Counting(IterableDataset[int]):
    """Its position is a state of its own."""

    def __init__(self, samples: int) -> None:
        self.samples, self.start, self.at = samples, 0, 0

    def __iter__(self) -> Any:
        for at in range(self.start, self.samples):
            self.at = at
            yield at * 100 + int(torch.randint(100, ()))
        self.start = 0

    def state_dict(self) -> dict[str, int]:
        return {"start": self.at + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["start"] % self.samples


class OnlyIterable:
    """A loader by behaviour."""

    def __iter__(self) -> Any:
        return iter([torch.tensor([i, i * int(torch.randint(9, ()))]) for i in range(11)])


STREAMS = {
    "nothing but __iter__": OnlyIterable,
    "an iterable data set": lambda: DataLoader(Counting(22), batch_size=2, num_workers=1),
    "a state of its own": lambda: DataLoader(Counting(22), batch_size=2),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_goes_on_where_it_was(name: str) -> None:
    """Also when it draws random numbers; and training's own are left alone."""
    torch.manual_seed(7)
    straight = TrainLoader(STREAMS[name](), plan(), 0, CPU, None)
    seen, positions, ends = [], {}, []
    for _ in range(2):
        for batch in straight:
            seen.append(batch.tolist())
            positions[straight.consumed] = straight.position()
            ends.append(straight.has_ended)
    assert len(seen) == 18 and [i for i, end in enumerate(ends) if end] == [8, 17]
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(7).get_state())
    for steps in (1, 2, 3, 4, 5):
        resumed = TrainLoader(STREAMS[name](), replace(plan(), resume="x"), 0, CPU, None)
        resumed.load_state_dict({"samples_consumed": 6 * steps})
        resumed.go_on_from(positions[6 * steps])
        assert [b.tolist() for _ in range(1 + (steps < 3)) for b in resumed] == seen[3 * steps :], steps
    with pytest.raises(ConfigError, match="does not say where it was on 1 ranks.*resume_allow"):
        resumed.go_on_from(None)


def test_a_stream_is_read_on_one_rank() -> None:
    train = TrainLoader(DataLoader(Stream(), batch_size=2), plan(), 0, CPU, None)
    assert torch.cat(list(train)).tolist() == list(range(6)), "whole windows only"
    limited = EvaluationLoader(DataLoader(Stream(), batch_size=2), plan(), 0, deque().append, limit=2)
    assert torch.cat(list(limited)).tolist() == list(range(4))


def test_a_stream_that_gives_no_step_is_told() -> None:
    with pytest.raises(ConfigError, match="ended before one step was made: a step takes 7 micro-batches on every rank"):
        list(TrainLoader(DataLoader(Stream(), batch_size=2), plan(accumulate=7), 0, CPU, None))
    once = TrainLoader(iter([torch.zeros(2)] * 5), plan(), 0, CPU, None)
    assert len(list(once)) == 3
    with pytest.raises(ConfigError, match=r"for epoch 2.* can it be read only once\?"):
        list(once)


class Draws:
    """Its samples are numbers drawn from torch, NumPy and Python; what collates them draws once more."""

    def __init__(self, reads_many: bool = False) -> None:
        if reads_many:
            self.__getitems__ = lambda keys: [self[key] for key in keys]

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> list[float]:
        return [index, float(torch.rand(())), float(numpy.random.rand()), random.random()]


def with_time(samples: list[list[float]]) -> Tensor:
    return torch.tensor([[*sample, float(torch.rand(()))] for sample in samples], dtype=torch.float64)


def drawn(ranks: int = 2, start: int = 0, micro: int = 2, evaluation: bool = False, **options: Any) -> Tensor:
    """Of all ranks and, in training, two epochs: [sample, (index, three draws, one of collating)]."""
    given: Any = {"dataset": Draws(), "batch_size": micro, "collate_fn": with_time, "shuffle": True} | options
    rows = []
    for rank in range(ranks):
        loader = DataLoader(**given)
        if evaluation:
            rows += list(EvaluationLoader(loader, plan(ranks, micro, 1), rank, deque().append))
            continue
        train = TrainLoader(loader, plan(ranks, micro, 1), rank, CPU, None)
        train.consumed = start
        rows += [batch for _ in range(2 - start // 24) for batch in train]
    found = torch.cat(rows)
    return found[found[:, 1].argsort()]


def test_a_sample_draws_from_its_own_place_in_the_run() -> None:
    """On every rank, with any number of workers, after a resume; and training's own numbers are left alone."""
    torch.manual_seed(7)
    first = drawn()
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(7).get_state())
    assert len(first) == 48 and all(len(first[:, column].unique()) == 48 for column in range(1, 5))
    assert torch.equal(drawn(num_workers=2, worker_init_fn=lambda worker: torch.manual_seed(0)), first)
    assert torch.equal(drawn(dataset=Subset(Draws(), range(24))), first)
    for start in (8, 28):
        rest = drawn(start=start)
        assert len(rest) == 48 - start and {*map(tuple, rest.tolist())} < {*map(tuple, first.tolist())}
    for other in (drawn(ranks=1), drawn(ranks=1, micro=4)):
        assert torch.equal(other[:, :4], first[:, :4]), "on other ranks, and in other micro-batches"


def test_seeds_travel_to_workers_that_are_not_forks() -> None:
    samples, keys = pickle.loads(pickle.dumps((SeededSamples(Draws()), with_seeds([3, 4], 0, 7))))
    assert samples.__getitems__(keys) == SeededSamples(Draws()).__getitems__(keys)
    assert keys.seeds[1:] + keys.seeds[:1] != keys.seeds and len(samples) == 24


def test_whatever_reads_the_samples_draws_otherwise_on_every_rank() -> None:
    batches = [[i, i + 1, i + 2][: 2 + i % 2] for i in range(0, 20, 2)]
    for options in (
        {"dataset": Draws(reads_many=True)},
        {"dataset": Draws(), "batch_size": None, "collate_fn": lambda sample: with_time([sample])},
        {"batch_size": 1, "shuffle": False, "batch_sampler": batches},
    ):
        found = drawn(**options)  # type: ignore[arg-type]
        assert all(len(found[:, column].unique()) == len(found) for column in range(1, 5)), options
        assert torch.equal(drawn(num_workers=2, **options), found)  # type: ignore[arg-type]


def test_an_evaluation_draws_the_same_numbers_each_time() -> None:
    state = torch.get_rng_state()
    first = drawn(evaluation=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(first[:, 1].unique()) == 24
    assert torch.equal(drawn(evaluation=True, num_workers=2), first)
    assert torch.equal(drawn(evaluation=True, ranks=1), first)


class DrawsOfWorkers(IterableDataset[Any]):
    def __iter__(self) -> Any:
        for _ in range(8):
            yield [float(torch.rand(())), float(numpy.random.rand()), random.random()]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_draws_otherwise_on_every_rank_and_worker(workers: int) -> None:
    """Also where its loader has a generator that every rank seeds alike; but for the first batches of an epoch."""
    rows = []
    for rank in range(2):
        given = {"batch_size": 2, "num_workers": workers, "collate_fn": torch.tensor}
        made = DataLoader(DrawsOfWorkers(), **given, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
        train = TrainLoader(made, plan(accumulate=1), rank, CPU, None)
        rows += [batch for _ in range(2) for batch in train]
        rows += list(EvaluationLoader(made, plan(), rank, deque().append))
    found, sources = torch.cat(rows), max(workers, 1)
    assert len(found) == 2 * 3 * 8 * sources
    assert all(len(column.unique()) == len(found) - 3 * 2 * sources for column in found.T)
    assert torch.equal(rows[0], rows[len(rows) // 2]), "a shuffle before the split by rank would differ"


def test_a_worker_shows_the_users_data_set() -> None:
    train = TrainLoader(loader(num_workers=1, worker_init_fn=looks), plan(), 0, CPU, None)
    assert len(list(train)) == 9


def looks(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None and type(info.dataset) is list
