import torch

from shardwise.nn.numerics import ExactMean


def test_every_item_counts_once_whatever_the_batches_sizes() -> None:
    mean = ExactMean(torch.device("cpu"))
    for values in ([1.0, 2.0, 3.0], [10.0]):
        mean.update(torch.tensor(values).sum(), len(values))
    mean.update(torch.tensor(0.0), torch.tensor(0))  # a batch in which nothing counts
    assert mean.compute() == 4.0


def test_a_large_sum_loses_no_small_batch() -> None:
    mean = ExactMean(torch.device("cpu"))
    mean.update(torch.tensor(2.0**24), 1)
    for _ in range(8):
        mean.update(torch.tensor(1.0), 1)
    assert mean.total == 2.0**24 + 8


def test_without_items_there_is_no_division_by_zero() -> None:
    mean = ExactMean(torch.device("cpu"))
    mean.update(torch.tensor(0.0), torch.tensor(0))
    assert mean.compute() == 0
