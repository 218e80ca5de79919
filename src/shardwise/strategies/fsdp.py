"""`fsdp` and `fsdp_hybrid`: FSDP2's `fully_shard`.

It shards parameters, gradients and optimizer state.
Each unit is gathered just before it runs and freed after; its gradients are reduce-scattered as soon as they exist.
`fsdp` shards over all ranks. `fsdp_hybrid` shards over the `shard` axis of the mesh and keeps copies over `replicate`,
whose gradients are all-reduced once a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.distributed.parameters import refuse_gradient_hooks, renew_references
from shardwise.lightning_internals.results import take_logged_by
from shardwise.plan import Plan
from shardwise.strategies import fsdp_gathering
from shardwise.strategies.base import PlannedStrategy
from shardwise.strategies.fsdp_gathering import keep_frozen
from shardwise.strategies.fsdp_sharding import FsdpSharding, kept_whole
from shardwise.strategies.fsdp_step import FsdpPrecision, hand_over, take_new_shards
from shardwise.strategies.fsdp_symmetric_memory import settle_copies
from shardwise.strategies.fsdp_views import assigning_whole
from shardwise.strategies.fsdp_weights import FsdpWeights
from shardwise.strategies.sharded_state import DTensorState
from shardwise.strategies.whole_weights import explain


class FsdpStrategy(PlannedStrategy, ModelParallelStrategy):
    """Lightning's ModelParallelStrategy, which here shards any module by itself, on the Plan's mesh."""

    weights_class, sharding_class = FsdpWeights, FsdpSharding
    weights: FsdpWeights
    sharding: FsdpSharding  # from the set-up on

    def __init__(self, plan: Plan) -> None:
        super().__init__(timeout=timedelta(minutes=plan.strategy.timeout_minutes))
        self._use(plan, FsdpPrecision)
        assert isinstance(self.precision_plugin, FsdpPrecision)
        self.precision_plugin.settle_by(lambda: self.sharding.settle_last())

    def setup_environment(self) -> None:
        self._setup_distributed()
        self.mesh.build()
        self._device_mesh = self.mesh.build_shard_mesh(self.root_device.type)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.plan.topology.data_parallel_size, "rank": self.mesh.data_rank(self.global_rank)}

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.weights.read_whole_numbers()
        self.closing.add(keep_frozen())
        assigning = ExitStack()
        assigning.enter_context(assigning_whole())
        self.closing.add(assigning.close)
        if not self.plan.topology.is_data_parallel_only:
            take_logged_by(trainer, self.weights.take_logged)
        self._begin_setup(self.module)
        self.plan = settle_copies(self.plan, self.mesh, self.device_mesh, self.root_device)
        self.sharding = self.sharding_class(self)
        self.sharding.shard()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            renew_references(self.module)
            with self.weights.shards.writable():
                self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                hand_over(optimizer, self.sharded, self.plan.strategy.name)
                optimizer.around_step = partial(self.weights.shards.around_step, optimizer)  # type: ignore[attr-defined]
        self.setup_precision_plugin()
        refuse_gradient_hooks(self.module, self.module_name, self.plan.strategy.name)
        self._end_setup()

    def share_batches(self) -> None:
        """Let ranks of a tensor, context or pipeline axis share batches."""
        from shardwise.strategies.shared_batches import SharedBatches

        self.shared = SharedBatches(self, self.module)

    def keeps_whole(self, parameter: nn.Parameter) -> bool:
        return kept_whole(parameter)

    def check_loss(self, loss: Tensor) -> None:
        super().check_loss(loss)
        if self.sharded.tensor_parallel is not None:
            self.sharded.tensor_parallel.check_loss(loss)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        backward = super().backward
        with self.explaining(), self.weights.shards.paused():
            loss: Tensor = self.sharding.backwards.run(lambda: backward(closure_loss, optimizer, *args, **kwargs))
        if self.module.automatic_optimization:
            self.order.end()
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.explaining(), self.weights.shards.paused():
            return super().training_step(*args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.weights.shards.paused():
            return super().optimizer_step(*args, **kwargs)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if (explained := explain(error, self.module_name, self.plan.strategy.name)) is not None:
                raise explained from error
            if self.sharded.tensor_parallel is not None:
                self.sharded.tensor_parallel.explain(error)
            raise

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.sharding.begin_batch()
        take_new_shards(self.optimizers)
        super().on_train_batch_start(batch, batch_idx)

    def _note_step(self, *_: Any) -> None:
        super()._note_step()
        self.sharding.backwards.reshard()  # a layer that is still gathered, for a hook, say, would use its old weights

    def block_backward_sync(self) -> Any:
        return self.sharding.without_reduction()

    def _make_sharded_state(self, module: LightningModule) -> DTensorState:
        return DTensorState(module, lambda: self.optimizers, lambda: fsdp_gathering.free_gathered(module))
