"""Reads the user's training loader window by window, in the order of the run, and weighs each window."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader

from shardwise import accelerator
from shardwise.data.order import DrawnOrder, GlobalOrder
from shardwise.data.streams import Group, Stream, check_own_samples, check_same_order
from shardwise.data.user_loader import (
    Batches,
    attribute_of,
    check_batch_size,
    draw_order,
    drawing_apart,
    is_stream,
    name_of,
    sampler_of,
    shuffles,
    with_batches,
    with_seeds,
    with_watched_workers,
)
from shardwise.distributed.mesh import Mesh, sum_over
from shardwise.distributed.rng import derived_seed
from shardwise.errors import ConfigError, class_name
from shardwise.parallel.precision import map_tensors
from shardwise.plan import Plan
from shardwise.protocols import optional

# The order is computed for this many steps at once: a call takes as long for one sample as for a thousand.
_STEPS_AT_A_TIME = 64


class TrainLoader:
    """Gives a rank's micro-batches, window by window (a window: the micro-batches of one step).

    If the data set has indices, the global order (or that of the user's sampler) is dealt out over the ranks. Any other
    loader keeps an order of its own (see streams.py). Before the first micro-batch of a window is handed over, the
    module's `loss_weight(batch)` is summed over the window and the data-parallel ranks. `next_scale` then gives a
    factor for each micro-batch. With it the gradient that is accumulated and averaged over ranks is the gradient of
    the mean over the global batch.

    `part_of(batch)`: the part of a batch of whole sequences that this rank computes.
    """

    def __init__(
        self,
        loader: Any,
        plan: Plan,
        rank: int,
        device: torch.device,
        loss_weight: Callable[[Any], float] | None,
        flops: Callable[[Any], int] | None = None,
        group: Group = lambda: None,
        mesh: Mesh | None = None,
        part_of: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self.original, self.mesh, self.part_of = loader, mesh or Mesh(plan), part_of
        self.plan, self.rank, self.device, self.loss_weight, self.flops = plan, rank, device, loss_weight, flops
        self.consumed = 0  # the training clock: how many samples of all ranks were handed over
        self._scales: deque[Tensor | None] = deque()
        self.window_start = 0  # the clock at the begin of the current window
        self._window_begins = False  # until `window_has_begun` has said so
        self.window_weight = 0.0  # the sum of its loss weights (tokens, samples) on this rank
        self.window_flops = 0  # the sum of its FLOPs on this rank
        self.fetching_seconds = 0.0  # how long the host waited for the window
        self.has_ended = False  # whether the last micro-batch was the epoch's last; known for streams only
        self.stream: Stream | None = None
        self._positions: dict[int, dict[str, Any]] = {}  # clock → position of the stream, after the last few windows
        identity = optional(self._samples, "identity_of_data")
        self._identity = {} if identity is None else identity()  # when the run begins
        check_batch_size(loader, plan)
        if is_stream(loader):
            check_own_samples(loader, plan)
            if plan.guard.on_spike == "rollback":
                raise ConfigError(
                    f"guard.on_spike=rollback: {name_of(loader)} keeps an order of its own and starts anew when a "
                    f"run goes back: its windows are not found again; use guard.on_spike=skip"
                )
            self.stream = Stream(with_watched_workers(loader, rank), plan, group, rank)
        else:
            self.by_batch, self.order = _order_of(loader, plan, group)
            self.keys_per_batch = 1 if self.by_batch else plan.micro_batch_size
            self.keys_per_step = self.keys_per_batch * plan.global_batch_size // plan.micro_batch_size
            self.loader = with_batches(loader, Batches(self._rest_of_epoch, len(self)), plan.seed)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the user's loader, which a module may read: `self.trainer.train_dataloader.dataset`."""
        return attribute_of(self, name)

    def next_scale(self) -> Tensor | None:
        """The factor of the loss of the next micro-batch; None: the loss is used as it is."""
        return self._scales.popleft()

    def window_has_begun(self) -> bool:
        """Whether the micro-batch just handed over is the first of its window. Called once for each."""
        begins, self._window_begins = self._window_begins, False
        return begins

    @property
    def _samples(self) -> Any:
        return getattr(self.original, "dataset", None)

    def progress(self, consumed: int) -> dict[str, float]:
        """What the data set says of itself for the log, when the run has consumed so many samples."""
        progress = optional(self._samples, "progress_of_run")
        values = {} if progress is None else progress(self.plan.seed, consumed)
        return {f"data/{name}": value for name, value in values.items()}

    def notices(self) -> list[str]:
        """What the data set has to say to the user before training."""
        steps, notices = self.plan.max_steps, optional(self._samples, "notices_for_run")
        return [] if notices is None else notices(None if steps is None else steps * self.plan.global_batch_size)

    def rewind(self, steps: int) -> None:
        """Set the training clock back by `steps` that have changed nothing."""
        self.consumed -= steps * self.plan.global_batch_size

    def __len__(self) -> int:
        if self.stream is None:
            return self.order.steps_per_epoch * self.plan.accumulate_grad_batches
        if self.stream.length is None:
            raise TypeError(f"{name_of(self.original)} has no length that is known before it is read")
        return self.stream.length

    def __iter__(self) -> Iterator[Any]:
        self._scales.clear()
        size, windows = self.plan.accumulate_grad_batches, self._windows()
        while True:
            begin = time.perf_counter()
            if (found := next(windows, None)) is None:
                return
            window, position, is_last = found
            self.fetching_seconds = time.perf_counter() - begin
            self.window_start, self._window_begins, self.has_ended = self.consumed, True, False
            # Ranks of a context axis share the sequences equally; a part alone would not tell what attention costs.
            self.window_flops = sum(map(self.flops, window)) // self.plan.topology.context if self.flops else 0
            window = [self.part_of(batch) for batch in window]
            for number, (batch, scale) in enumerate(zip(window, self._window_scales(window), strict=True), start=1):
                self.consumed += self.plan.micro_batch_size * self.plan.topology.data_parallel_size
                self._scales.append(scale)
                if number == size and position is not None:
                    self.has_ended = is_last
                    self._keep_position(position)
                yield batch

    def _windows(self) -> Iterator[tuple[list[Any], dict[str, Any] | None, bool]]:
        if self.stream is not None:
            yield from self.stream.windows()
            return
        if self.loader.generator is not None:
            epoch = self.consumed // self.plan.global_batch_size // self.order.steps_per_epoch
            self.loader.generator.manual_seed(derived_seed(self.plan.seed, "workers", self.rank, epoch))
        batches = drawing_apart(self.loader)
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
        if self._identity:
            state["data"] = self._identity
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
        before, is_now = (of.get("data") or {} for of in (state, now))
        changed = [
            f"{name} was {before.get(name, 'not there')} and is {is_now.get(name, 'not there')}"
            for name in sorted(before | is_now)
            if not _is_same(before.get(name), is_now.get(name))
        ]
        if before and changed:  # checkpoints from before there was an identity lack it
            raise ConfigError(
                f"resume={resume}: the training data has changed since the checkpoint: {'; '.join(changed)}; give the "
                f"data as it was, or resume_allow=[data] to go on with what is there now"
            )
        if state.get("order", now.get("order")) != now.get("order"):
            raise ConfigError(
                f"resume={resume}: the training loader's sampler gives another order than in the run that is resumed: "
                f"it must be a function of its arguments, of torch's random numbers, which are seeded before each "
                f"epoch, and of set_epoch(epoch); resume_allow=[data] goes on in the new order"
            )

    def go_on_from(self, position: dict[str, Any] | None) -> None:
        """Let this rank's stream go on from its `position` in a checkpoint; None: the position is not known.

        Raises:
            ConfigError: the position is not known, and `resume_allow` does not let the data start anew.
        """
        if self.stream is None or self.consumed == 0:
            return
        if position is not None:
            self.stream.go_on_from(position)
            self._keep_position(position)
        elif "data" not in self.plan.resume_allow:
            raise ConfigError(
                f"resume={self.plan.resume}: {name_of(self.original)} keeps an order of its own, and the checkpoint "
                f"does not say where it was on {self.plan.topology.data_parallel_size} ranks: go on with as many ranks "
                f"as wrote it, or resume_allow=[data], and the data starts anew"
            )

    def position(self) -> dict[str, Any] | None:
        """The position of the stream at the begin of the window to which the clock points."""
        return self._positions.get(self.consumed // self.plan.global_batch_size * self.plan.global_batch_size)

    def _keep_position(self, position: dict[str, Any]) -> None:
        self._positions[self.consumed] = position
        # The guard may take back this many steps, with those that it has not judged yet.
        steps = self.plan.guard.max_in_a_row + 8
        self._positions.pop(self.consumed - steps * self.plan.global_batch_size, None)

    def samples_of(self, start: int) -> list[Any] | None:
        """The data-set indices of each micro-batch of this rank's window at clock `start`; None for a stream."""
        if self.stream is not None:
            return None
        return self._micro_batches_of_rank(start // self.plan.global_batch_size, 1)

    def _micro_batches_of_rank(self, step: int, steps: int) -> list[Any]:
        ranks, keys = self.plan.topology.data_parallel_size, self.keys_per_step
        dealt = self.order.micro_batches(step * keys, steps * keys, self.rank, ranks, self.keys_per_batch).tolist()
        return [batch for (batch,) in dealt] if self.by_batch else dealt

    def _rest_of_epoch(self) -> Iterator[Any]:
        step = self.consumed // self.plan.global_batch_size
        end = (step // self.order.steps_per_epoch + 1) * self.order.steps_per_epoch
        ranks, size, seed = (
            self.plan.topology.data_parallel_size,
            self.keys_per_batch,
            derived_seed(self.plan.seed, "data"),
        )
        for first in range(step, end, _STEPS_AT_A_TIME):
            keys_of_batches = self._micro_batches_of_rank(first, min(_STEPS_AT_A_TIME, end - first))
            for number, keys in enumerate(keys_of_batches):
                position = first * self.keys_per_step + (number * ranks + self.rank) * size
                if self.by_batch and type(keys) is list:  # many samples have one position
                    yield with_seeds(keys, derived_seed(seed, position), 0)
                else:
                    yield with_seeds(keys, seed, position)

    def _window_scales(self, window: list[Any]) -> list[Tensor | None]:
        if self.loss_weight is None:
            return [None] * len(window)
        weights = [self.loss_weight(batch) for batch in window]
        self.window_weight = sum(weights)
        ranks = self.plan.topology.loss_size
        if len(window) == ranks == 1 and weights[0] > 0:
            return [None]  # the micro-batch is the whole global batch
        # torch.tensor would wait for the copy.
        total = torch.full((), sum(weights), dtype=torch.float64, device=self.device)
        if dist.is_initialized():
            sum_over(self.mesh.group("data"), total)
        # The strategy divides by the number of ranks, and Lightning by that of micro-batches. This undoes both.
        per_weight = len(window) * ranks / total.clamp(min=1)
        return [weight * per_weight for weight in weights]


def _is_same(before: str | None, now: str | None) -> bool:
    """Whether two identities agree in the parts, separated by "; ", that the older one has."""
    return before == now or (before is not None and now is not None and now.startswith(f"{before}; "))


def _order_of(loader: DataLoader[Any], plan: Plan, group: Group) -> tuple[bool, GlobalOrder | DrawnOrder]:
    """Whether each key stands for a whole batch of the user's and not for a sample, and the order of the keys.

    Raises:
        ConfigError: batches of another size, or a sampler that gives every rank another order.
    """
    by_batch = loader.batch_sampler is None  # the data set gives whole batches
    sampler, per_step = sampler_of(loader), plan.global_batch_size
    if sampler is loader.batch_sampler:
        sizes = [len(batch) for batch in draw_order(loader, plan.seed, 0)]
        by_batch = len(set(sizes[:-1] or sizes)) > 1
        if not by_batch and sizes and sizes[0] != plan.micro_batch_size:
            raise ConfigError(
                f"the training loader's {type(sampler).__name__} makes batches of {sizes[0]} samples, and "
                f"micro_batch_size={plan.micro_batch_size}: give micro_batch_size={sizes[0]}"
            )
    if by_batch:
        per_step //= plan.micro_batch_size
    most = None if plan.max_train_batches is None else plan.max_train_batches // plan.accumulate_grad_batches
    if (shuffle := shuffles(loader)) is not None:
        samples = len(loader.dataset)  # type: ignore[arg-type]
        return by_batch, GlobalOrder(
            samples, per_step, shuffle, plan.seed, most, optional(loader.dataset, "draw_for_run")
        )

    def draw(epoch: int) -> Sequence[Any]:
        keys = draw_order(loader, plan.seed, epoch)
        if by_batch or sampler is not loader.batch_sampler:
            return keys
        return [key for batch in keys if len(batch) == plan.micro_batch_size for key in batch]  # the last may be short

    drawn = DrawnOrder(draw, per_step, type(sampler).__name__, most)
    check_same_order(drawn.digest, drawn.name, "training", group)
    return by_batch, drawn


# How much a batch counts in the loss, as the module says.


def weigher_of(module: Any) -> Callable[[Any], float] | None:
    """`loss_weight` of `module`, or None. What it gives is a number, also where it is a tensor of one element.

    Raises:
        ConfigError: by what is returned: the module gives no number from 0 on.
    """
    weigh = optional(module, "loss_weight")
    if weigh is None or not module.automatic_optimization:  # which weighs its micro-batches itself
        return None

    def number_of(batch: Any) -> float:
        weight = number = weigh(batch)
        with suppress(RuntimeError, ValueError):  # of several elements
            number = weight.item() if hasattr(weight, "item") else weight
        if not isinstance(number, (int, float)) or not 0 <= number < math.inf:
            given = f"a tensor of shape {tuple(weight.shape)}" if hasattr(number, "shape") else repr(number)
            raise ConfigError(
                f"{class_name(module)}.loss_weight gave {given}: it must give one number from 0 on, how many tokens "
                f"of the batch count, say"
            )
        return number

    return number_of


# Copies batches from the host to the device.

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class BatchTransfer:
    """Copies batches to the device. A large batch is copied while the device still works on the last step.

    `hosts`: the module and its data, which may override Lightning's hooks for this.
    """

    def __init__(self, device: torch.device, *hosts: Any) -> None:
        self.device = device
        self._hooks = {name for name in _HOOKS for host in hosts if is_overridden(name, host)}
        self._copies: accelerator.Stream | None = None

    def copy(self, batch: Any) -> Any:
        """Copy the tensors of a batch to the device, unless the module or its data copies them itself."""
        if not accelerator.has_streams(self.device) or "transfer_batch_to_device" in self._hooks:
            return batch
        tensors: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            copied = tensor if tensor.device.type != "cpu" else tensor.to(self.device, non_blocking=True)
            tensors.append(copied)
            return copied

        if _is_plain(batch) and _is_small_and_pinned(batch):
            return map_tensors(copy, batch)
        self._copies = self._copies or accelerator.new_stream(self.device)
        computing = accelerator.current_stream(self.device)
        with accelerator.in_stream(self._copies):
            batch = map_tensors(copy, batch)
        for tensor in tensors:
            tensor.record_stream(computing)
        computing.wait_stream(self._copies)
        return batch

    def leaves_work(self, batch: Any) -> bool:
        """Whether Lightning must still call a hook of the user's, or move objects that are no tensors.

        It leaves tensors alone that are on the device already.
        """
        return bool(self._hooks) or not _is_plain(batch)


def _is_small_and_pinned(batch: Any) -> bool:
    """Whether a copy on the device's main stream is best: it takes less time than the host needs for a second stream.

    From memory that is not pinned, the host would wait for the copy.
    """
    tensors = [batch] if isinstance(batch, Tensor) else list(batch.values() if isinstance(batch, dict) else batch)
    return sum(t.nbytes for t in tensors) < 2**20 and all(t.device.type != "cpu" or t.is_pinned() for t in tensors)


def _is_plain(batch: Any) -> bool:
    """Whether the batch is a tensor, or a list, tuple or dict of tensors, so that no other objects must be moved."""
    if isinstance(batch, (list, tuple)):
        return all(isinstance(item, Tensor) for item in batch)
    return isinstance(batch, Tensor) or (type(batch) is dict and all(isinstance(v, Tensor) for v in batch.values()))
