"""The training clock: one order of samples, whatever the ranks, micro-batches and accumulation that walk through it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data.order import GlobalOrder, permute
from shardwise.errors import ConfigError

keys = st.integers(0, 2**64 - 1)


@given(st.integers(1, 5000), keys)
def test_permute_is_a_bijection(size: int, key: int) -> None:
    image = permute(np.arange(size), size, key)
    assert image.dtype == np.int64
    np.testing.assert_array_equal(np.sort(image), np.arange(size))


def test_permute_is_a_bijection_at_every_small_size() -> None:
    for size in range(1, 140):
        np.testing.assert_array_equal(np.sort(permute(np.arange(size), size, key=7)), np.arange(size))


@given(st.integers(1, 5000), keys, st.data())
def test_permute_needs_no_neighbours(size: int, key: int, data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=20)), dtype=np.int64)
    np.testing.assert_array_equal(permute(index, size, key), permute(np.arange(size), size, key)[index])


@given(st.integers(100, 5000), keys, keys)
def test_keys_permute_differently(size: int, key: int, other: int) -> None:
    images = permute(np.arange(size), size, key), permute(np.arange(size), size, other)
    assert (images[0] == images[1]).all() == (key == other)


def test_permute_is_the_same_on_every_platform_and_version() -> None:
    assert permute(np.arange(10), 10, key=42).tolist() == [1, 0, 5, 9, 7, 4, 8, 2, 3, 6]
    assert GlobalOrder(10, 5, shuffle=True, seed=3).indices(10, 10).tolist() == [4, 7, 9, 2, 0, 3, 6, 5, 8, 1]


def test_permute_holds_at_a_billion() -> None:
    image = permute(np.arange(1000), 10**9 + 7, key=1)
    assert len(set(image.tolist())) == 1000 and image.min() >= 0 and image.max() < 10**9 + 7
    assert abs(image.mean() / 1e9 - 0.5) < 0.05  # spread over the whole range


@st.composite
def orders(draw: st.DrawFn) -> GlobalOrder:
    samples = draw(st.integers(1, 300))
    return GlobalOrder(samples, draw(st.integers(1, samples)), draw(st.booleans()), draw(st.integers(0, 2**63 - 1)))


@given(orders(), st.integers(0, 5))
def test_an_epoch_repeats_nothing_and_drops_the_incomplete_batch(order: GlobalOrder, epoch: int) -> None:
    assert order.steps_per_epoch * order.global_batch_size == order.samples_per_epoch <= order.samples
    assert order.samples - order.samples_per_epoch < order.global_batch_size
    seen = order.indices(epoch * order.samples_per_epoch, order.samples_per_epoch)
    assert len(seen) == len(set(seen.tolist())) == order.samples_per_epoch
    assert seen.min() >= 0 and seen.max() < order.samples


@given(orders(), st.integers(0, 3))
def test_without_shuffle_the_order_is_the_data_sets(order: GlobalOrder, epoch: int) -> None:
    order = GlobalOrder(order.samples, order.global_batch_size, shuffle=False, seed=order.seed)
    seen = order.indices(epoch * order.samples_per_epoch, order.samples_per_epoch)
    assert seen.tolist() == list(range(order.samples_per_epoch))


def test_epochs_and_seeds_differ() -> None:
    rows = {
        tuple(GlobalOrder(64, 8, shuffle=True, seed=seed).indices(epoch * 64, 64))
        for seed in range(20)
        for epoch in range(20)
    }
    assert len(rows) == 400
    firsts = [row[0] for row in rows]
    assert len(set(firsts)) > 55  # of 64


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 7), st.booleans(), st.integers(0, 9))
def test_every_factorisation_sees_the_same_global_batches(
    a: int, b: int, c: int, step: int, shuffle: bool, extra: int
) -> None:
    batch = a * b * c
    order = GlobalOrder(3 * batch + extra, batch, shuffle, seed=5)
    consumed = step * batch
    expected = sorted(order.indices(consumed, batch).tolist())
    for ranks in _divisors(batch):
        for micro in _divisors(batch // ranks):
            parts = [
                order.micro_batches(consumed, batch, rank, ranks, micro)[part]
                for part in range(batch // ranks // micro)
                for rank in range(ranks)
            ]
            assert all(len(part) == micro for part in parts)
            assert sorted(np.concatenate(parts).tolist()) == expected


@given(orders(), st.integers(0, 1000))
def test_a_position_is_all_that_a_resumed_run_needs(order: GlobalOrder, step: int) -> None:
    again = GlobalOrder(order.samples, order.global_batch_size, order.shuffle, order.seed)
    at = step * order.global_batch_size
    batch = order.indices(at, order.global_batch_size)
    epoch, position = divmod(at, order.samples_per_epoch)
    whole = again.indices(epoch * order.samples_per_epoch, order.samples_per_epoch)
    np.testing.assert_array_equal(batch, whole[position : position + order.global_batch_size])


def test_less_than_a_batch_is_refused_and_the_remedy_works() -> None:
    message = "training set has 7 samples, less than one global_batch_size=8: use a smaller one, and"
    with pytest.raises(ConfigError, match=message):
        GlobalOrder(7, 8, shuffle=True, seed=0)
    assert GlobalOrder(7, 7, shuffle=True, seed=0).steps_per_epoch == 1


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
