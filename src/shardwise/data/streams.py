"""Reads loaders that keep an order of their own: iterable data sets, and iterables that are no DataLoader.

Every data-parallel rank reads its own loader, so the user's code must split the data by rank (RANK and WORLD_SIZE are
in the environment). This file makes the ranks agree: they must start on different samples, they end an epoch in the
same window, and each rank's position is part of a checkpoint.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.encoding import PLAIN, NotPlainError, encode
from shardwise.data.user_loader import RandomStreams, name_of, set_epoch
from shardwise.distributed.mesh import gather_objects
from shardwise.distributed.rng import derived_seed, seed_host, set_random_state
from shardwise.errors import ConfigError
from shardwise.plan import Plan

_CPU = torch.device("cpu")
_END = object()


def check_own_samples(loader: Any, plan: Plan) -> None:
    """Refuse a stream where ranks share samples: it splits itself by RANK and WORLD_SIZE.

    Raises:
        ConfigError
    """
    axes = {axis: n for axis, n in plan.topology.mesh.items() if axis in ("pipeline", "context", "tensor")}
    if axes:
        words = " ".join(f"strategy.{axis}_parallel_size={n}" for axis, n in axes.items())
        raise ConfigError(
            f"{words}: ranks of such an axis need the same samples, and {name_of(loader)} keeps an order of its own, "
            f"which each rank splits by RANK and WORLD_SIZE; use a data set with a length and indices"
        )


class Stream:
    """Reads one rank's micro-batches a window ahead, so that all ranks know which window is the last."""

    def __init__(self, loader: Any, plan: Plan, group: Group, rank: int = 0) -> None:
        self.loader, self.plan, self.group, self.rank = loader, plan, group, rank
        self.size = plan.accumulate_grad_batches
        self.length = self._shortest_length()  # an epoch's micro-batches on every rank; None: not known
        self.epoch = 0
        self.batches = 0  # how many of this epoch were handed over, in whole windows
        self.stateful = _stateful(loader)
        self._fresh: Any = None  # the state of the data set before a position was restored
        self._leaves_position = False  # whether the data set may start each epoch at the restored position
        self._random = RandomStreams(0)
        self._resumed: dict[str, Any] | None = None
        self._iterator: Iterator[Any] = iter(())
        self._has_ended = False  # whether this rank's iterator ended in this epoch
        self._in_epoch = self._looked = self._is_known_plain = self._restored = False
        if plan.topology.data_parallel_size > 1 or plan.checkpoint.saves:
            _print_on_rank_zero(
                f"data: {name_of(loader)} keeps an order of its own; a run that is resumed, on as many ranks as "
                f"before, {self._how_it_goes_on()}"
            )

    def windows(self) -> Iterator[tuple[list[Any], dict[str, Any], bool]]:
        """Read an epoch: each window, the position after it, and whether it is the last one. Collective.

        Raises:
            ConfigError: two ranks read the same samples, or the epoch has not even one whole window.
        """
        if self._in_epoch:  # the last epoch was left early
            self.epoch, self.batches = self.epoch + 1, 0
        self._in_epoch = True
        try:
            self._begin()
            yield from self._windows()
        finally:
            self._iterator = iter(())  # ends its worker processes
        self.epoch, self.batches, self._in_epoch = self.epoch + 1, 0, False

    def _windows(self) -> Iterator[tuple[list[Any], dict[str, Any], bool]]:
        window = self._read()
        if window is None:
            raise self._too_short()
        while window is not None:
            self.batches += self.size
            position = self._position()
            following = self._read()
            self._look_at_first(window, following)
            if following is None:
                position = self._position_at_end()
                if self._restored and self.plan.max_train_batches is None:
                    with self._random():  # some loaders start anew only after their end
                        deque(self._iterator, maxlen=0)
            yield window, position, following is None
            window = following

    def go_on_from(self, position: dict[str, Any]) -> None:
        """Go on from a position of this rank."""
        self.epoch, self.batches, self._resumed = position["epoch"], position["batches"], position

    def _begin(self) -> None:
        """Make an iterator at the position of `go_on_from`, or at the start of the epoch."""
        position, self._resumed = self._resumed, None
        set_epoch(self.loader, self.epoch)
        self._random = RandomStreams(derived_seed(self.plan.seed, "stream", self.epoch))
        restored = position is not None and position["state"] is not None and self.stateful is not None
        with self._random():
            if restored:
                assert position is not None
                self._fresh = copy.deepcopy(self.stateful.state_dict())
                self.stateful.load_state_dict(position["state"])
            elif self._leaves_position and not self._has_ended:  # at its end it starts anew by itself
                self.stateful.load_state_dict(self._fresh)
            self._restored = restored
            self._leaves_position = restored and self.stateful is not self.loader
            self._iterator = _once(iter(self.loader))
            if restored and self.batches == 0:
                self._end_epoch_before(is_over=position["over"])  # type: ignore[index]
            elif restored:
                set_random_state(position["random"], _CPU)  # type: ignore[index]
            elif self.batches:
                self._read_again()
        self._has_ended = False

    def _end_epoch_before(self, is_over: bool) -> None:
        """Read the rest of the epoch after its last window, which some loaders need in order to start the next one."""
        first = _END
        if is_over:
            first = next(self._iterator, _END)
        else:
            deque(self._iterator, maxlen=0)
        self._iterator = _once(iter(self.loader)) if first is _END else chain([first], self._iterator)

    def _read_again(self) -> None:
        _print_on_rank_zero(
            f"data: the first {self.batches} micro-batches of {name_of(self.loader)} are read again on every rank and "
            f"passed over, up to where the checkpoint was written"
        )
        passed = sum(1 for _ in islice(self._iterator, self.size))
        self._draw_apart()
        passed += sum(1 for _ in islice(self._iterator, self.batches - self.size))
        if passed < self.batches:
            raise ConfigError(
                f"resume={self.plan.resume}: {name_of(self.loader)} ended after {passed} of the {self.batches} "
                f"micro-batches that the checkpoint's run had read: it is not the data of that run"
            )

    def _read(self) -> list[Any] | None:
        """Read the next window; None if it is incomplete on a rank, or if the epoch is over. Collective."""
        is_over = self.batches == self.length
        with self._random():
            window = list(islice(self._iterator, 1 if is_over else self.size))
            if self.batches == 0:
                self._draw_apart()
        self._has_ended = len(window) < (1 if is_over else self.size)
        self._lowest = 0 if is_over else smallest(len(window), self.group)
        return window if self._lowest == self.size else None

    def _draw_apart(self) -> None:
        """Draw other random numbers than other ranks from here on.

        All draw alike until an epoch's first window has been read: so they agree on a shuffle before the split by rank,
        and a stream that is not split shows the same samples to `check_distinct`.
        """
        seed_host(derived_seed(self.plan.seed, "stream", self.epoch, self.rank))

    def _position(self) -> dict[str, Any]:
        state = None
        if self.stateful is not None:
            state = copy.deepcopy(self.stateful.state_dict())
            if not self._is_known_plain and not _is_plain(state):
                self.stateful = state = None
                _print_on_rank_zero(
                    f"data: the state of {name_of(self.loader)} is not plain data ({PLAIN}), and nothing else travels "
                    f"with a position: a run that is resumed {self._how_it_goes_on()}"
                )
            self._is_known_plain = True
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "random": self._random.state,
            "state": state,
            "over": False,
        }

    def _position_at_end(self) -> dict[str, Any]:
        position = self._position() | {"epoch": self.epoch + 1, "batches": 0, "over": self._has_ended}
        if self.stateful is not self.loader and not self._has_ended:  # a shorter rank ended the epoch: all start anew
            position["state"] = None
        return position

    def _look_at_first(self, window: list[Any], following: list[Any] | None) -> None:
        if not self._looked:
            self._looked = True
            first, second = [*window, *(following or [])][:1], [*window, *(following or [])][1:2]
            check_distinct(first, second, self.loader, "training", self.group)

    def _too_short(self) -> ConfigError:
        name, many = name_of(self.loader), f"{self.size} micro-batch{'es' * (self.size > 1)} on every rank"
        if self.epoch == 0:
            return ConfigError(
                f"the training data {name} ended before one step was made: a step takes {many}, and "
                f"{'a rank' if count_ranks() > 1 else 'it'} gave {self._lowest}; use a smaller global_batch_size, or "
                f"more data"
            )
        return ConfigError(
            f"the training data {name} gave {self._lowest} micro-batches when it was read for epoch {self.epoch + 1}, "
            f"and a step takes {many}: can it be read only once? Its __iter__ must start anew each time"
        )

    def _how_it_goes_on(self) -> str:
        if self.stateful is not None:
            return "restores its state"
        return "reads it again up to where it was, which is exact if the data comes in the same order each time"

    def _shortest_length(self) -> int | None:
        try:
            length = len(self.loader)
        except (TypeError, NotImplementedError):
            length = 0
        length = smallest(length, self.group)
        if self.plan.max_train_batches is not None:
            length = min(length or self.plan.max_train_batches, self.plan.max_train_batches)
        return (length // self.size * self.size) or None


def evaluation_batches(
    loader: Any, plan: Plan, rank: int, limit: int | None, group: Group
) -> Iterator[tuple[Any, bool]]:
    """Give a rank's batches, and whether each is padding: its last batch again, while other ranks have more.

    Collective. `limit`: the most batches of all ranks together.
    """
    ranks = plan.topology.data_parallel_size
    random_streams = RandomStreams(derived_seed(plan.seed, "evaluation stream"))
    with random_streams():
        batches = _once(iter(loader))
        head = list(islice(batches, 1))
        seed_host(derived_seed(plan.seed, "evaluation stream", rank))
        head += islice(batches, 1)
    check_distinct(head[:1], head[1:], loader, "evaluation", group)
    batches, turn, last = chain(head, batches), 0, _END
    while True:
        has_one = limit is None or turn * ranks + rank < limit
        with random_streams():
            batch = next(batches, _END) if has_one else _END
        if smallest(int(batch is _END), group) == 1:
            return
        last = last if batch is _END else batch
        if last is _END:
            raise ConfigError(
                f"the evaluation data {name_of(loader)} has no batch on rank {rank}: every rank needs at least one; "
                f"split it into at least {ranks} parts, or evaluate on fewer ranks"
            )
        yield last, batch is _END
        turn += 1


def _once(iterator: Iterator[Any]) -> Iterator[Any]:
    """Give the same items. Another `iter` of a loader that is its own iterator would start it anew."""
    while (item := next(iterator, _END)) is not _END:
        yield item


def _stateful(loader: Any) -> Any:
    """The object whose state has the position: the loader, or its data set if no worker process reads ahead."""
    if has_state(loader):
        return loader
    dataset = getattr(loader, "dataset", None)
    return dataset if getattr(loader, "num_workers", 1) == 0 and has_state(dataset) else None


def has_state(host: Any) -> bool:
    """Whether its state can be taken and restored, without an argument such as the number of samples."""
    try:
        inspect.signature(host.state_dict).bind()
        inspect.signature(host.load_state_dict).bind({})
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def _is_plain(value: Any) -> bool:
    try:
        encode(value)
    except NotPlainError:
        return False
    return True


def _print_on_rank_zero(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


# Checks that the ranks read different samples, in one order.

# Gives the group of all hosts, which is made when it is first needed.
Group = Callable[[], "dist.ProcessGroup | None"]


def smallest(number: int, group: Group) -> int:
    """The smallest `number` of all ranks. Collective, on the hosts."""
    if count_ranks() == 1:
        return number
    lowest = torch.tensor(number)
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group())
    return int(lowest)


def count_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def check_distinct(first: list[Any], second: list[Any] | None, loader: Any, purpose: str, group: Group) -> None:
    """Check that all ranks have different first samples, unless these equal the `second` ones. Collective.

    Raises:
        ConfigError: two ranks have the same first samples.
    """
    if count_ranks() == 1:
        return
    digest = _digest(first)
    distinct = None if not first or (second and _digest(second) == digest) else digest
    digests = gather_objects(group(), distinct)
    for rank, found in enumerate(digests):
        if found is not None and found in digests[:rank]:
            raise ConfigError(
                f"the {purpose} data {name_of(loader)} keeps an order of its own, and ranks {digests.index(found)} and "
                f"{rank} of {count_ranks()} read the same samples: split it by rank where it is read. RANK and "
                f"WORLD_SIZE are in the environment; use datasets.distributed.split_dataset_by_node(dataset, rank, "
                f"world_size), webdataset.split_by_node, or itertools.islice(samples, rank, None, world_size) in its "
                f"__iter__; worker processes split their rank's part again (torch.utils.data.get_worker_info)"
            )


def _digest(value: Any) -> str | None:
    """A digest that is equal for equal samples; None if the samples cannot be pickled."""
    sums = hashlib.sha256()

    def add(value: Any) -> None:
        sums.update(type(value).__name__.encode())
        if isinstance(value, Tensor) and value.layout == torch.strided:
            value = value.as_subclass(Tensor)  # a subclass may answer other than torch does
            sums.update(f"{value.dtype}{tuple(value.shape)}".encode())
            sums.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, item in value.items():
                add(key)
                add(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            sums.update(pickle.dumps(value))

    try:
        add(value)
    except Exception:  # of whatever a stranger's object does when it is looked at
        return None
    return sums.hexdigest()


def check_same_order(digest: str, name: str, purpose: str, group: Group) -> None:
    """Check that a sampler of the class `name` gives all ranks the same order, which has this digest. Collective.

    Raises:
        ConfigError: two ranks have different orders.
    """
    if count_ranks() > 1 and len(set(gather_objects(group(), digest))) > 1:
        raise ConfigError(
            f"the {purpose} loader's {name} gives ranks different samples, and what it gives is dealt out over "
            f"the ranks here: let it give every rank the order of the whole data set, from torch's random numbers, "
            f"which are seeded before each epoch, or from set_epoch(epoch)"
        )
