"""What a strategy does about batches that ranks share. For parts of sequences see parallel/context_parallel.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from shardwise.data.loaders import weigher_of
from shardwise.distributed.mesh import Mesh, gather_metrics_among, largest_over, sum_over
from shardwise.distributed.rng import OwnDraws, derived_seed, seed_streams
from shardwise.lightning_internals.results import LoggedValue
from shardwise.nn.attention import use_sequence_parts, whole_sequences
from shardwise.parallel.context_hugging_face import divide_models
from shardwise.parallel.context_parallel import ContextParallel
from shardwise.parallel.hugging_face_models import hugging_face_models
from shardwise.parallel.tensor_parallel import TensorParallel
from shardwise.parallel.units import Units
from shardwise.plan import Plan
from shardwise.protocols import sequence_tensors_of
from shardwise.step.window import AccumulationWindow

_IN_TRAINING = ("training_step", "on_train_batch_end")
_IN_EVALUATION = ("validation_step", "on_validation_batch_end", "test_step", "on_test_batch_end")


class SharedBatches:
    """What ranks of a tensor, context or pipeline axis do about the batches that they share.

    A strategy has one where not every rank sees samples of its own.
    """

    def __init__(self, strategy: Any, module: LightningModule) -> None:
        """Let attention of this process work on parts of sequences until the run ends, if a context axis asks."""
        plan: Plan = strategy.plan
        mesh: Mesh = strategy.mesh
        window: AccumulationWindow = strategy.step.window
        self.strategy, self.plan, self.mesh, self.window, self.module = strategy, plan, mesh, window, module
        self.context: ContextParallel | None = None
        self._draws_alike: tuple[str, ...] = ()  # the axes whose ranks draw the same in a step
        self._own_draws: OwnDraws | None = None  # what layers draw that have parts of what those ranks have whole
        self._batches_evaluated = 0  # batches since the last one of training
        self._evaluated: Any = None  # the batch that is evaluated, on the host
        self._cut_for_evaluation: deque[Any] = deque()  # the batches that the loader gave, on the host
        self._sharing = 1  # the ranks that are given the same whole batches, of which each computes a part
        if self.plan.topology.context > 1:
            self._divide_sequences()
        # Metrics of torchmetrics add up what different samples have given, or different parts of samples
        gather_metrics_among(self.mesh.group("samples" if self._sharing > 1 else "loss"))

    def _divide_sequences(self) -> None:
        by_keys, tensors = self.plan.strategy.context_parallel_method == "keys", sequence_tensors_of(self.module)
        parts = ContextParallel(self.mesh.group("context"), by_keys=by_keys, tensors=tensors)
        if not tensors:  # models of Hugging Face are given whole batches, and divide them themselves
            self._sharing = parts.ranks
            self.strategy.closing.add(divide_models(self.module, parts))
            return
        self.context = parts
        use_sequence_parts(parts)
        self.strategy.closing.add(partial(use_sequence_parts, None))

    def share_draws(self, units: Units, divided: TensorParallel | None) -> None:
        """Let ranks that run the same step on the same batch draw the same, and layers in which they have parts not.

        Between layers that follow the plan of a Hugging Face model tensor ranks have no parts.
        """
        shares_batches, cuts = self._sharing > 1, divided is not None and not divided.follows_plan
        self._draws_alike = ("tensor",) * (divided is not None) + ("context",) * shares_batches
        if not (shares_batches or cuts):
            return
        place = self.plan.topology.position(self.strategy.global_rank)
        self._own_draws = OwnDraws(self.strategy.root_device, place["tensor"] * cuts, place["context"] * shares_batches)
        if divided is not None and cuts:
            divided.draw_apart(self._own_draws, units)
        if shares_batches:
            for model in hugging_face_models(self.module).values():
                self._own_draws.begin_in(model)
                self._own_draws.end_behind(model)
            for _, unit in units.modules:  # a later stage of a pipeline begins here
                self._own_draws.begin_in(unit)

    @property
    def stream_rank(self) -> int:
        """The rank whose random streams this one has. Dropout must differ between ranks that compute other numbers."""
        groups = self.plan.topology.groups(self._draws_alike)
        return next(ranks[0] for ranks in groups if self.strategy.global_rank in ranks)

    @cached_property
    def _batch_rank(self) -> int:
        """The rank by which a batch's stream is seeded."""
        rank: int = self.strategy.stream_rank
        return rank

    def cut(self, batch: Any) -> Any:
        """This rank's part of a batch of whole sequences."""
        return batch if self.context is None else self.context.cut(batch)

    def cut_and_keep(self, batch: Any) -> Any:
        """The same of a batch of an evaluation, which is weighed if something is logged of it."""
        part = self.cut(batch)
        if self.context is not None:
            self._cut_for_evaluation.append(part)
        return part

    def begin_evaluation(self) -> None:
        if self.context is not None:
            self._evaluated = self._cut_for_evaluation.popleft()

    def loss_weight(self) -> Callable[[Any], float] | None:
        """How much a batch counts on this rank."""
        weight, ranks = weigher_of(self.module), self._sharing
        return weight if weight is None or ranks == 1 else lambda batch: weight(batch) / ranks

    def seed_batch(self) -> None:
        """Begin the stream of a batch, before the hooks around its step.

        So ranks draw the same again if one of them alone has drawn something, for a log, say.
        """
        if not self._draws_alike:
            return
        self._batches_evaluated = 0 if self.module.trainer.training else self._batches_evaluated + 1
        loader = self.strategy.train_loader
        consumed = 0 if loader is None else loader.consumed
        seed_streams(derived_seed(self.plan.seed, "batch", self._batch_rank, consumed, self._batches_evaluated))

    def take_logged(self, logged: LoggedValue) -> Any:
        """The value of whole sequences, as one rank has it, of one that was computed of parts.

        Collective in the ranks of the context axis, which all log the same.
        """
        is_of_batch = logged.hook in _IN_TRAINING or logged.hook in _IN_EVALUATION
        if self.context is None or not is_of_batch or not isinstance(logged.value, Tensor):
            return logged.value
        if logged.options.get("rank_zero_only"):
            return logged.value
        how, together = logged.options["reduce_fx"], bool(logged.options.get("sync_dist"))
        weight = self._weight_of_part(logged.hook)
        return self._of_whole_sequences(logged.value, getattr(how, "__name__", how).lower(), weight, together)

    def _of_whole_sequences(self, part: Tensor, how: str, weight: Tensor | float, together: bool) -> Tensor:
        """`together`: Lightning will reduce the value over all ranks."""
        group, dtype = self.mesh.group("context"), part.dtype if part.is_floating_point() else torch.float32
        value = part.detach().to(torch.float64, copy=True)
        if how == "sum":
            whole = value if together else sum_over(group, value)
        elif how in ("max", "min"):
            sign = 1 if how == "max" else -1
            whole = sign * largest_over(group, sign * value)
        else:
            weight = torch.zeros_like(value) + weight
            counted = torch.where(weight > 0, weight * value, 0.0)  # a mean of nothing is not a number
            total, weights, plain = sum_over(group, torch.stack([counted, weight, value])).unbind()
            whole = torch.where(weights > 0, total / weights, plain / group.size())
        return whole.to(dtype)

    def _weight_of_part(self, hook: str) -> Tensor | float:
        """What this rank's part counts among the parts of its sequences."""
        if hook in _IN_TRAINING:
            return 1.0 if self.window.factor is None else self.window.factor
        weight = weigher_of(self.module)
        return 1.0 if weight is None else float(weight(self._evaluated))

    def begin_batch(self, batch: Any, *_: Any) -> None:
        if self.context is not None:
            self.context.begin_batch(batch)

    def outside_steps(self) -> list[AbstractContextManager[None]]:
        """What is put around hooks: layers may run on whole sequences there."""
        return [] if self.context is None else [whole_sequences()]

    def end_batch(self) -> None:
        """After a step."""
        if self._own_draws is not None:
            self._own_draws.leave()
