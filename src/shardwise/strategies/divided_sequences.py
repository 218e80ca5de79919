"""What a strategy does about batches that ranks share. For parts of sequences see parallel/context_parallel.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule

from shardwise.checkpoint.train_state import TrainState
from shardwise.checkpoint.verify import load_own
from shardwise.distributed.mesh import Mesh
from shardwise.lightning_internals.results import use_group_in_metrics
from shardwise.nn.sequence_parts import use_sequence_parts
from shardwise.parallel.context_hugging_face import divide_models
from shardwise.parallel.context_parallel import ContextParallel
from shardwise.plan import Plan
from shardwise.protocols import loss_weight_of, sequence_tensors_of


class DividedSequences:
    """A part of `PlannedStrategy`. Where every rank sees samples of its own it does nothing."""

    plan: Plan
    mesh: Mesh
    module: Any
    global_rank: int
    state: TrainState
    resumed_from: Path
    at_teardown: Callable[[Callable[[], Any]], None]
    context: ContextParallel | None = None
    _sharing_batches = 1  # the ranks that are given the same whole batches, of which each computes a part

    def _divide_sequences(self, module: LightningModule) -> None:
        """Let attention of this process work on parts of sequences until the run ends."""
        if self.plan.topology.context == 1:
            return
        by_keys, tensors = self.plan.strategy.context_parallel_method == "keys", sequence_tensors_of(module)
        parts = ContextParallel(self.mesh.group("context"), by_keys=by_keys, tensors=tensors)
        if not tensors:  # models of Hugging Face are given whole batches, and divide them themselves
            self._sharing_batches = parts.ranks
            self.at_teardown(divide_models(module, parts))
            return
        self.context = parts
        use_sequence_parts(parts)
        self.at_teardown(partial(use_sequence_parts, None))

    @property
    def _stream_rank(self) -> int:
        """The rank whose random streams this one has. Dropout must differ between ranks that compute other numbers."""
        return self.global_rank

    def _saved_streams(self) -> dict[str, Any] | None:
        """Where these streams stood in the resumed checkpoint: in its layout this rank may have had others."""
        if self.state.of_rank is None:
            return None
        with self.state.loading():
            streams, _ = load_own(self.resumed_from, self._stream_rank, self.plan.trust)
        return streams

    def _cut(self, batch: Any) -> Any:
        """This rank's part of a batch of whole sequences."""
        return batch if self.context is None else self.context.cut(batch)

    def _loss_weight(self, module: LightningModule) -> Callable[[Any], float] | None:
        """How much a batch counts on this rank."""
        weight, ranks = loss_weight_of(module), self._sharing_batches
        return weight if weight is None or ranks == 1 else lambda batch: weight(batch) / ranks

    def _begin_batch(self, batch: Any, *_: Any) -> None:
        if not self.plan.topology.is_data_parallel_only:
            use_group_in_metrics(self.module, self.mesh.group("loss"))
        if self.context is not None:
            self.context.begin_batch(batch)
