"""The user's loaders under our order: windows that know their weight, and validation that counts every sample once."""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from shardwise.config.targets import locate
from shardwise.data.order import DrawnOrder, GlobalOrder
from shardwise.data.streams import Group, OwnRandom, Stream, evaluation_batches, name_of, set_epoch
from shardwise.distributed.rng import derived_seed
from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.process.parent import kill_with_parent
from shardwise.process.signals import leave_to_parent

_STEPS_AT_A_TIME = 64  # whose order is worked out: a call costs as much for one sample as for a thousand


class TrainLoader:
    """A rank's micro-batches, window by window (a window: the micro-batches of one step).

    A loader over a data set with places has our order, or its sampler's, dealt out over the ranks; any other keeps an
    order of its own (see streams.py). The module's `loss_weight(batch)` is asked for the whole window before its first
    micro-batch is handed over, and summed over the data-parallel ranks: `scales` then holds, per micro-batch handed
    over and not yet taken, the factor that makes the accumulated, rank-averaged gradient that of the mean over the
    global batch.
    """

    def __init__(
        self,
        loader: Any,
        plan: Plan,
        rank: int,
        device: torch.device,
        loss_weight: Callable[[Any], int] | None,
        flops: Callable[[Any], int] | None = None,
        group: Group = lambda: None,
    ) -> None:
        self.given = loader
        self.plan, self.rank, self.device, self.loss_weight, self.flops = plan, rank, device, loss_weight, flops
        self.consumed = 0  # samples of all ranks whose micro-batches were handed over: the training clock
        self.scales: deque[Tensor | None] = deque()
        self.window_start = 0  # the clock at the window that is being handed over
        self.window_begins = False  # until its first micro-batch was taken note of
        self.window_weight = 0  # of this rank's micro-batches: summed loss weights (tokens, samples)
        self.window_flops = 0  # and FLOPs
        self.fetching_seconds = 0.0  # that the host waited for them
        self.has_ended = False  # the micro-batch that was handed over is the epoch's last; known of streams only
        self.stream: Stream | None = None
        self._positions: dict[int, dict[str, Any]] = {}  # of the stream, behind the last windows, by the clock
        _check_batch_size(loader, plan)
        if is_stream(loader):
            if plan.guard.on_spike == "rollback":
                raise ConfigError(
                    f"guard.on_spike=rollback: {name_of(loader)} keeps an order of its own and starts anew when a "
                    f"run goes back: its windows are not found again; use guard.on_spike=skip"
                )
            self.stream = Stream(_with_watched_workers(loader), plan, group)
        else:
            self.by_batch, self.order = _order_of(loader, plan, group)
            self.keys_per_batch = 1 if self.by_batch else plan.micro_batch_size
            self.keys_per_step = self.keys_per_batch * plan.global_batch_size // plan.micro_batch_size
            self.loader = _with_batches(loader, _Batches(self._rest_of_epoch, len(self)), plan.seed)

    def __getattr__(self, name: str) -> Any:
        """What a module reads of its own loader: `self.trainer.train_dataloader.dataset`, say."""
        return _attribute_of(self, name)

    def __len__(self) -> int:
        if self.stream is None:
            return self.order.steps_per_epoch * self.plan.accumulate_grad_batches
        if self.stream.length is None:
            raise TypeError(f"{name_of(self.given)} has no length that is known before it is read")
        return self.stream.length

    def __iter__(self) -> Iterator[Any]:
        self.scales.clear()
        size, windows = self.plan.accumulate_grad_batches, self._windows()
        while True:
            asked = time.perf_counter()
            if (found := next(windows, None)) is None:
                return
            window, position, is_last = found
            self.fetching_seconds = time.perf_counter() - asked
            self.window_start, self.window_begins, self.has_ended = self.consumed, True, False
            self.window_flops = sum(map(self.flops, window)) if self.flops else 0
            for number, (batch, scale) in enumerate(zip(window, self._window_scales(window), strict=True), start=1):
                self.consumed += self.plan.micro_batch_size * self.plan.topology.data_parallel_size
                self.scales.append(scale)
                if number == size and position is not None:
                    self.has_ended = is_last
                    self._keep_position(position)
                yield batch

    def _windows(self) -> Iterator[tuple[list[Any], dict[str, Any] | None, bool]]:
        if self.stream is not None:
            yield from self.stream.windows()
            return
        batches = iter(self.loader)
        while len(window := list(islice(batches, self.plan.accumulate_grad_batches))) == (
            self.plan.accumulate_grad_batches
        ):
            yield window, None, False

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"samples_consumed": self.consumed}
        if self.stream is None and self.by_batch:
            state["micro_batch_size"] = self.plan.micro_batch_size
        if self.stream is None and isinstance(self.order, DrawnOrder):
            state["order"] = self.order.digest
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.consumed = state["samples_consumed"]
        now, resume = self.state_dict(), self.plan.resume
        if "data" in self.plan.resume_allow:
            return
        if (before := state.get("micro_batch_size")) != now.get("micro_batch_size") and before is not None:
            raise ConfigError(
                f"resume={resume}: the data comes in batches of its own, each of which counted as {before} samples; "
                f"give micro_batch_size={before}, or resume_allow=[data] to go on elsewhere in the data"
            )
        if state.get("order", now.get("order")) != now.get("order"):
            raise ConfigError(
                f"resume={resume}: the training loader's sampler gives another order than in the run that is resumed: "
                f"it must be a function of its arguments, of torch's random numbers, which are seeded before each "
                f"epoch, and of set_epoch(epoch); resume_allow=[data] goes on in the new order"
            )

    def take_up(self, position: dict[str, Any] | None) -> None:
        """Before training: where this rank's stream was when the checkpoint was written; None: that is not known.

        Raises:
            ConfigError: the checkpoint does not say where, and nobody has said that the data may start anew.
        """
        if self.stream is None or self.consumed == 0:
            return
        if position is not None:
            self.stream.take_up(position)
            self._keep_position(position)
        elif "data" not in self.plan.resume_allow:
            raise ConfigError(
                f"resume={self.plan.resume}: {name_of(self.given)} keeps an order of its own, and the checkpoint does "
                f"not say where it was on {self.plan.topology.data_parallel_size} ranks: go on with as many ranks as "
                f"wrote it, or resume_allow=[data], and the data starts anew"
            )

    def position(self) -> dict[str, Any] | None:
        """Of the stream, at the begin of the window to which the clock points."""
        return self._positions.get(self.consumed // self.plan.global_batch_size * self.plan.global_batch_size)

    def _keep_position(self, position: dict[str, Any]) -> None:
        self._positions[self.consumed] = position
        kept = self.plan.guard.max_in_a_row + 8  # steps that the guard may take back, with those not yet judged
        self._positions.pop(self.consumed - kept * self.plan.global_batch_size, None)

    def samples_of(self, start: int) -> list[Any] | None:
        """Per micro-batch of this rank's window at clock `start`: its places in the data set. None: it is a stream."""
        if self.stream is not None:
            return None
        return self._own_micro_batches(start // self.plan.global_batch_size, 1)

    def _own_micro_batches(self, step: int, steps: int) -> list[Any]:
        ranks, keys = self.plan.topology.data_parallel_size, self.keys_per_step
        dealt = self.order.micro_batches(step * keys, steps * keys, self.rank, ranks, self.keys_per_batch).tolist()
        return [batch for (batch,) in dealt] if self.by_batch else dealt

    def _rest_of_epoch(self) -> Iterator[Any]:
        step = self.consumed // self.plan.global_batch_size
        end = (step // self.order.steps_per_epoch + 1) * self.order.steps_per_epoch
        for first in range(step, end, _STEPS_AT_A_TIME):
            yield from self._own_micro_batches(first, min(_STEPS_AT_A_TIME, end - first))

    def _window_scales(self, window: list[Any]) -> list[Tensor | None]:
        if self.loss_weight is None:
            return [None] * len(window)
        weights = [self.loss_weight(batch) for batch in window]
        self.window_weight = sum(weights)
        if len(window) == self.plan.topology.data_parallel_size == 1 and weights[0] > 0:
            return [None]  # the micro-batch is the whole global batch
        # torch.tensor would wait for the copy
        total = torch.full((), sum(weights), dtype=torch.float64, device=self.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
        # The strategy averages over ranks and Lightning over micro-batches: both divisors are put back.
        per_weight = len(window) * self.plan.topology.data_parallel_size / total.clamp(min=1)
        return [weight * per_weight for weight in weights]


class EvaluationLoader:
    """A rank's share of a data set, each sample on one rank; every rank gets equally many batches.

    Strategies that gather parameters need all ranks in every forward. A rank without samples left runs a padding batch,
    as large as a full one; `paddings` holds, per batch handed over and not yet taken, whether it is one. `limit`:
    batches of all ranks.
    """

    def __init__(
        self,
        loader: Any,
        plan: Plan,
        rank: int,
        paddings: deque[bool],
        limit: int | None = None,
        group: Group = lambda: None,
    ) -> None:
        self.given, self.plan, self.rank, self.paddings, self.limit, self.group = (
            loader, plan, rank, paddings, limit, group
        )  # fmt: skip
        self.batches: list[Any] | None = None  # of all ranks, in turn; None: it is a stream
        if is_stream(loader):
            self.loader = _with_watched_workers(loader)
            return
        self.batches = _evaluation_keys(loader, plan)[:limit]
        ranks = plan.topology.data_parallel_size
        turns = math.ceil(len(self.batches) / ranks)
        padded = [*self.batches, *self.batches[:1] * (turns * ranks - len(self.batches))]
        self.loader = _with_batches(loader, padded[rank::ranks], plan.seed)

    def __getattr__(self, name: str) -> Any:
        return _attribute_of(self, name)

    def __len__(self) -> int:
        if self.batches is None:
            raise TypeError(f"{name_of(self.given)} has no length that is known before it is read")
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self.batches is None:
            for batch, is_padding in evaluation_batches(self.loader, self.plan, self.rank, self.limit, self.group):
                self.paddings.append(is_padding)
                yield batch
            return
        for turn, batch in enumerate(self.loader):
            self.paddings.append(self.number_of(turn) >= len(self.batches))
            yield batch

    def number_of(self, turn: int) -> int:
        """This rank's batch in a turn → its number among those of all ranks."""
        return turn * self.plan.topology.data_parallel_size + self.rank

    def samples_of(self, turn: int) -> list[Any] | None:
        """The places in the data set of this rank's batch; none: it is padding. None: they are not known."""
        if self.batches is None or (self.given.batch_size is None and self.given.batch_sampler is None):
            return None
        number = self.number_of(turn)
        return list(self.batches[number]) if number < len(self.batches) else []


class _Batches:
    """A batch sampler whose next pass starts where the clock stands."""

    def __init__(self, make: Callable[[], Iterator[Any]], length: int) -> None:
        self.make, self.length = make, length

    def __iter__(self) -> Iterator[Any]:
        return self.make()

    def __len__(self) -> int:
        return self.length


def is_stream(loader: Any) -> bool:
    """Whether a loader keeps an order of its own: it cannot be asked for the sample at a place."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return True
    try:
        len(_sampler_of(loader))
    except (TypeError, NotImplementedError):
        return True
    return False


def _attribute_of(loader: Any, name: str) -> Any:
    if name.startswith("__") or "given" not in vars(loader):
        raise AttributeError(name)
    return getattr(loader.given, name)


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """What gives the order: a batch sampler of the user's own, or the sampler."""
    return loader.batch_sampler if loader.batch_size is None and loader.batch_sampler is not None else loader.sampler


def _order_of(loader: DataLoader[Any], plan: Plan, group: Group) -> tuple[bool, GlobalOrder | DrawnOrder]:
    """Whether a key is a whole batch of the user's, not the place of a sample; and the order of keys.

    Raises:
        ConfigError: batches of another size, or a sampler that gives every rank another order.
    """
    by_batch = loader.batch_sampler is None  # the data set gives batches
    sampler, per_step = _sampler_of(loader), plan.global_batch_size
    if sampler is loader.batch_sampler:
        sizes = [len(batch) for batch in _draw(loader, plan.seed, 0)]
        by_batch = len(set(sizes[:-1] or sizes)) > 1
        if not by_batch and sizes and sizes[0] != plan.micro_batch_size:
            raise ConfigError(
                f"the training loader's {type(sampler).__name__} makes batches of {sizes[0]} samples, and "
                f"micro_batch_size={plan.micro_batch_size}: give micro_batch_size={sizes[0]}"
            )
    if by_batch:
        per_step //= plan.micro_batch_size
    most = None if plan.max_train_batches is None else plan.max_train_batches // plan.accumulate_grad_batches
    if (shuffle := _shuffles(loader)) is not None:
        samples = len(loader.dataset)  # type: ignore[arg-type]
        return by_batch, GlobalOrder(samples, per_step, shuffle, plan.seed, most)

    def draw(epoch: int) -> Sequence[Any]:
        keys = _draw(loader, plan.seed, epoch)
        if by_batch or sampler is not loader.batch_sampler:
            return keys
        return [key for batch in keys if len(batch) == plan.micro_batch_size for key in batch]  # the last may be short

    drawn = DrawnOrder(draw, per_step, type(sampler).__name__, most)
    _check_same_order(drawn, group)
    return by_batch, drawn


def _draw(loader: DataLoader[Any], seed: int, epoch: int) -> Sequence[Any]:
    """An epoch of the user's own sampler: places, or batches of them. A function of seed and epoch."""
    sampler = _sampler_of(loader)
    with OwnRandom(derived_seed(seed, "order", epoch))():
        for part in (sampler, getattr(sampler, "sampler", None)):
            if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                generator.manual_seed(derived_seed(seed, "order", epoch))
        set_epoch(loader, epoch)
        return list(sampler)


def _check_same_order(order: DrawnOrder, group: Group) -> None:
    """Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, order.digest, group=group())
    if len(set(digests)) > 1:
        raise ConfigError(
            f"the training loader's {order.name} gives ranks different samples, and what it gives is dealt out over "
            f"the ranks here: let it give every rank the order of the whole data set, from torch's random numbers, "
            f"which are seeded before each epoch, or from set_epoch(epoch)"
        )


def _shuffles(loader: DataLoader[Any]) -> bool | None:
    """None: a sampler says more than that."""
    sampler: Any = _sampler_of(loader)
    samples = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
    if type(sampler) is DistributedSampler:  # what it does is done here
        return bool(sampler.shuffle)
    if len(sampler) == samples and type(sampler) in (RandomSampler, SequentialSampler):
        replaces = getattr(sampler, "replacement", False)
        return None if replaces else type(sampler) is RandomSampler
    return None


def _evaluation_keys(loader: DataLoader[Any], plan: Plan) -> list[Any]:
    """Per batch of all ranks: its samples' places, or its one key where the data set gives batches. The data set's
    order, unless the loader has a sampler of its own."""
    if _shuffles(loader) is None:
        keys = list(_draw(loader, plan.seed, 0))
        if _sampler_of(loader) is loader.batch_sampler:
            return [list(batch) for batch in keys]
    else:
        keys = list(range(len(loader.dataset)))  # type: ignore[arg-type]
    size = loader.batch_size
    if size is None:
        return keys
    end = len(keys) // size * size if loader.drop_last else len(keys)
    return [keys[start : start + size] for start in range(0, end, size)]


def _with_batches(loader: DataLoader[Any], batches: Any, seed: int) -> DataLoader[Any]:
    """The same loader with another order; `batches`: lists of places, or single ones where it does not collate."""
    order: dict[str, Any] = {"batch_sampler": batches}
    if loader.batch_sampler is None:
        order = {"sampler": batches, "batch_size": None}
    # Of its own: else each pass would draw from the stream that dropout draws from, and so would a resumed one.
    generator = loader.generator or torch.Generator().manual_seed(seed)
    start_worker = partial(_start_worker, loader.worker_init_fn)
    if _iterates_its_own_way(loader):
        return _copy_with(loader, {**order, "generator": generator, "worker_init_fn": start_worker})
    return DataLoader(
        loader.dataset,
        **order,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=start_worker,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        generator=generator,
    )


def _iterates_its_own_way(loader: DataLoader[Any]) -> bool:
    kind = type(loader)
    if kind.__module__.startswith("torchdata."):  # whose state is not needed where the order is ours
        return False
    return kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator


def _copy_with(loader: DataLoader[Any], changed: dict[str, Any]) -> DataLoader[Any]:
    """Of the same class, which iterates in its own way over another order."""
    copied = copy.copy(loader)
    if (batches := changed.get("batch_sampler")) is not None:
        changed |= {"sampler": SequentialSampler(batches), "batch_size": None, "drop_last": False}
    vars(copied).update(changed | {"_iterator": None})  # DataLoader refuses to be assigned to
    return copied


def _with_watched_workers(loader: Any) -> Any:
    if isinstance(loader, DataLoader) and loader.num_workers:
        loader.worker_init_fn = partial(_start_worker, loader.worker_init_fn)
    return loader


def _start_worker(then: Callable[[int], None] | None, worker: int) -> None:
    kill_with_parent()  # torch's own watch takes seconds, and prints tracebacks meanwhile
    leave_to_parent()
    if then is not None:
        then(worker)


def _check_batch_size(loader: Any, plan: Plan) -> None:
    size = getattr(loader, "batch_size", None)
    if not isinstance(loader, DataLoader) or size in (None, plan.micro_batch_size):
        return
    words = _words_for_batch_size(plan)
    named = f"'{words[0]}=${{micro_batch_size}}' (in quotes, as the shell would read ${{…}}), or " if words else ""
    raise ConfigError(
        f"the training loader's batch_size is {size}, and micro_batch_size={plan.micro_batch_size}: make them equal: "
        f"{named}micro_batch_size={size}"
    )


def _words_for_batch_size(plan: Plan) -> list[str]:
    """The arguments of the data, else of the module, whose name says that they are it."""
    found = []
    for word, node in (("data", plan.data), ("module", plan.module)):
        if not node or "_target_" not in node:
            continue
        try:
            names = [*node, *inspect.signature(locate(node["_target_"], word)).parameters]
        except (ValueError, ConfigError):
            names = list(node)
        found += [f"{word}.{name}" for name in dict.fromkeys(names) if name in ("batch_size", "train_batch_size")]
    return found
