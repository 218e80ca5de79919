"""Loaders that are loaders only by behaviour, read by one rank: what a `for` over them would read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardwise.config.compose import compose
from shardwise.data.streams import Stream, _digest
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan


class ItsOwnIterator:
    """`__iter__` starts anew, wherever it is called, and returns the loader."""

    at = 0

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> ItsOwnIterator:
        self.at = 0
        return self

    def __next__(self) -> int:
        if self.at == len(self):
            raise StopIteration
        self.at += 1
        return self.at


class StartsAnewBehindItsEnd:
    """As LitData's loader: once it has taken up a position, it does so only when it was read to its end."""

    at, restored = 0, False

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[int]:
        if not self.restored:
            self.at = 0
        while self.at < len(self):
            self.at += 1
            yield self.at
        self.restored = False

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.restored = state["at"], True


def plan() -> Plan:
    words = ["accelerator=cpu", "name=run", "micro_batch_size=4", "global_batch_size=8", "devices=1"]
    return make_plan(compose(words).jobs[0].config, Host(cuda_devices=0))


def epoch(stream: Stream) -> list[tuple[list[int], dict[str, Any]]]:
    """Left at its last window, as a training loop leaves it."""
    found = []
    for window, position, is_last in stream.windows():
        found.append((window, position))
        if is_last:
            break
    return found


def test_a_loader_that_is_its_own_iterator_is_read_on() -> None:
    stream = Stream(ItsOwnIterator(), plan(), lambda: None)
    for _ in range(2):
        assert [window for window, _ in epoch(stream)] == [[1, 2], [3, 4], [5, 6]]


def test_a_loader_that_went_on_from_a_position_begins_its_next_epoch_anew() -> None:
    position = epoch(Stream(StartsAnewBehindItsEnd(), plan(), lambda: None))[0][1]
    stream = Stream(StartsAnewBehindItsEnd(), plan(), lambda: None)
    stream.go_on_from(position)
    assert [window for window, _ in epoch(stream)] == [[3, 4], [5, 6]]
    assert [window for window, _ in epoch(stream)] == [[1, 2], [3, 4], [5, 6]]


class Labelled(torch.Tensor):
    """A tensor whose operations need labels, which it has lost."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ValueError("no labels")


class Unreadable:
    def __reduce__(self) -> Any:
        raise ValueError("not to be pickled")


def test_samples_of_any_kind_are_compared_or_left_out() -> None:
    rows = torch.arange(6.0)
    assert _digest([rows]) == _digest([rows.clone()]) != _digest([rows + 1])
    assert _digest([rows.as_subclass(Labelled)]) is None
    assert _digest([rows, Unreadable()]) is None
