"""`fsdp` and `fsdp_hybrid`: FSDP2's `fully_shard`.

It shards parameters, gradients and optimizer state.
Each unit is gathered just before it runs and freed after; its gradients are reduce-scattered as soon as they exist.
`fsdp` shards over all ranks. `fsdp_hybrid` shards over the `shard` axis of the mesh and keeps copies over `replicate`,
whose gradients are all-reduced once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.distributed.collectives import broadcast_from_rank_zero
from shardwise.distributed.parameters import keep_notes, refuse_gradient_hooks, renew_references
from shardwise.distributed.symmetric_memory import let_compiler_copy
from shardwise.distributed.views import assigning_whole
from shardwise.errors import ConfigError, class_name
from shardwise.lightning_internals.logged import take_logged_by
from shardwise.parallel.functional_calls import refuse_functional_calls
from shardwise.parallel.parallelize import roots_of
from shardwise.parallel.passed_through import return_passed_tensors
from shardwise.parallel.precision import dtype_of, mixed_precision_policy
from shardwise.parallel.tensor_parallel import TensorParallel
from shardwise.plan import Plan
from shardwise.strategies import fsdp_gathering, of_parts
from shardwise.strategies.base import PlannedStrategy
from shardwise.strategies.fsdp_copies import copy_between_ranks, settle_copies
from shardwise.strategies.fsdp_frozen import keep_frozen
from shardwise.strategies.fsdp_scalars import FsdpPrecision, Scalars
from shardwise.strategies.fsdp_views import ShardsInHooks
from shardwise.strategies.sharded_state import DTensorState
from shardwise.strategies.step_on_shards import hand_over, take_new_shards
from shardwise.strategies.whole_in_hooks import FsdpWeights
from shardwise.strategies.whole_weights import InnerBackwards, explain, show_outputs
from shardwise.weights.initialize import Materializer


class FsdpStrategy(PlannedStrategy, ModelParallelStrategy):
    """Lightning's ModelParallelStrategy, which here shards any module by itself, on the Plan's mesh."""

    weights_class = FsdpWeights
    weights: FsdpWeights

    def __init__(self, plan: Plan) -> None:
        super().__init__(timeout=timedelta(minutes=plan.strategy.timeout_minutes))
        self._use(plan, FsdpPrecision)
        assert isinstance(self.precision_plugin, FsdpPrecision)
        self.precision_plugin.settle_by(self._settle_last)
        self._sync_is_blocked = False  # whether the current micro-batch's gradients are not reduced yet

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
        self.at_teardown(keep_frozen())
        assigning = ExitStack()
        assigning.enter_context(assigning_whole())
        self.at_teardown(assigning.close)
        if not self.plan.topology.is_data_parallel_only:
            take_logged_by(trainer, self.weights.take_logged)
        self._shard()
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

    def _shard(self) -> None:
        """Make, initialise and shard one unit after the other, so that no rank ever holds the whole model."""
        module = self.lightning_module
        assert module is not None
        self._begin_setup(module)
        self.plan = settle_copies(self.plan, self.mesh, self.device_mesh, self.root_device)
        units = self.units
        if not self.plan.topology.is_data_parallel_only:
            from shardwise.strategies.shared_batches import SharedBatches

            self.shared = SharedBatches(self, module)
        divided = self._divide_layers(module)
        self._prepare_float8(module, divided)
        if divided is not None:
            divided.wrap(module)
        if self.shared is not None:
            self.shared.share_draws(units, divided)
        self.weights.shards = ShardsInHooks(
            module, None if divided is None else partial(of_parts.refuse_writes, self.module_name)
        )
        self._parallelize(module, units, casts_inputs=False)
        fsdp_gathering.check_prefetch(module, units, self.plan)
        materializer = Materializer(module, self.root_device, self.plan.seed, self.mesh.group("stage"))
        policy = mixed_precision_policy(self.plan.precision, is_root=False)
        with fsdp_gathering.one_mesh_for_all_units(self.plan):
            for _, unit in units.modules:
                if not self._materialize_unit(materializer, unit):
                    continue
                if divided is not None:
                    divided.cut(unit)
                self._shard_layer(unit, policy, self.plan.strategy.reshard_after_forward)
        self._materialize_rest(materializer)
        if divided is not None:
            divided.cut(module)
        self._shard_roots(module)
        fsdp_gathering.set_prefetch(module, units, self.plan)
        if self.plan.strategy.symmetric_memory:
            copy_between_ranks([layer for layer in module.modules() if isinstance(layer, FSDPModule)], self.plan)
        for name, layer in module.named_modules():
            if isinstance(layer, FSDPModule) and (group := layer._get_fsdp_state()._fsdp_param_group):
                if self.world_size > 1:
                    name = name or "what is outside of units"
                    fsdp_gathering.before_gathering(group, self.order.add(f"gathers {name}"))
                    _reduce_unused_as_zero(group, self.order.add(f"reduces the gradients of {name}"))
                self.weights.shards.watch_hooks(group)
            if isinstance(layer, nn.RNNBase):
                layer.flatten_parameters = _do_not_flatten  # type: ignore[method-assign]
        if self.float8 is not None:  # before the roots begin: FSDP2 looks then who gathers in fp8
            self.float8.gather(change_within_steps=not module.automatic_optimization)
        if not module.automatic_optimization:
            self._begin_roots()  # before an optimizer is toggled and some parameters need no gradients
        if divided is not None:
            for parameter in divided.divided():
                self.planned_precision.divide(parameter, self.mesh.group("tensor"))
        self.backwards = InnerBackwards(module, module.automatic_optimization)
        broadcast_from_rank_zero(list(module.buffers()), self.mesh.group("stage"))
        self._begin_roots()
        ranks = self.mesh.group("loss") if self.plan.topology.loss_size > 1 else None
        self._scalars = Scalars(module, ranks, dtype_of(self.plan.precision.reduce_dtype))

    def _shard_roots(self, module: LightningModule) -> None:
        """Shard what is outside of units."""
        within = {id(p) for root in roots_of(module) for p in root.parameters()}
        if any(id(p) not in within and not self._keeps_whole(p) for p in module.parameters()):  # it optimizes by hand
            raise ConfigError(
                f"{class_name(module)} optimizes by hand and owns parameters itself: {self.plan.strategy.name} "
                f"would go on with their old values within a step; move them into a layer, or use strategy=ddp"
            )
        policy = mixed_precision_policy(self.plan.precision, is_root=True)
        for root in roots_of(module):
            if not isinstance(root, FSDPModule) and any(True for _ in root.parameters()):
                self._shard_layer(root, policy, None if root is module else True)

    def _shard_layer(self, layer: nn.Module, policy: MixedPrecisionPolicy, reshard: bool | int | None) -> None:
        before = dict(layer.named_parameters())
        fsdp_gathering.allow_any_layout(type(layer))
        fully_shard(
            layer, mesh=self.device_mesh, mp_policy=policy, ignored_params=self._wholes(layer),
            reshard_after_forward=reshard,
        )  # fmt: skip
        refuse_functional_calls([layer], "FSDP gathers its weights; use strategy=ddp", lambda p: isinstance(p, DTensor))
        for name, shard in layer.named_parameters():
            if shard is not before[name]:
                keep_notes(shard, before[name])
        if layer is not self.lightning_module:
            return_passed_tensors(layer)
            show_outputs(layer)

    def _begin_roots(self) -> None:
        """Do what FSDP2 does when a root first runs. A layer that a hook runs before would be taken for a root."""
        for root in roots_of(self.module):
            if isinstance(root, FSDPModule):
                root._get_fsdp_state()._lazy_init()

    def _divide_layers(self, module: LightningModule) -> TensorParallel | None:
        """Find out what tensor parallelism divides. Weights are cut when they are there."""
        if self.plan.topology.tensor == 1:
            return None
        group, overlaps = self.mesh.group("tensor"), bool(self.plan.compile.overlaps_peers)
        if overlaps:
            let_compiler_copy(group)
        return self.sharded.divide(
            TensorParallel(module, group, by_sample=self.plan.topology.pipeline == 1, overlaps=overlaps)
        )

    def _materialize_unit(self, materializer: Materializer, unit: nn.Module) -> bool:
        """Give a unit its memory and initial values. Returns whether this rank has a part of it."""
        materializer.materialize(unit)
        return True

    def _materialize_rest(self, materializer: Materializer) -> None:
        """Do the same for all layers outside units."""
        materializer.materialize(self.module)

    def _keeps_whole(self, parameter: nn.Parameter) -> bool:
        """Whether FSDP2 cannot shard `parameter`, because it has no dimension or no elements. Every rank keeps it."""
        return parameter.ndim == 0 or parameter.numel() == 0

    def _wholes(self, layer: nn.Module) -> set[nn.Parameter]:
        return {p for p in layer.parameters() if self._keeps_whole(p)}

    def check_loss(self, loss: Tensor) -> None:
        super().check_loss(loss)
        if self.sharded.tensor_parallel is not None:
            self.sharded.tensor_parallel.check_loss(loss)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        backward = super().backward
        with self._explaining(), self.weights.shards.paused():
            loss: Tensor = self.backwards.run(lambda: backward(closure_loss, optimizer, *args, **kwargs))
        if self.module.automatic_optimization:
            self.order.end()
        return loss

    def _settle_last(self) -> None:
        if not self._sync_is_blocked:
            self._settle_gradients()

    def _settle_gradients(self) -> None:
        """Do what FSDP2 does not do for gradients, once a step, after the last backward pass. Collective."""
        self._scalars.average()
        if self.sharded.tensor_parallel is not None:
            self.sharded.tensor_parallel.sum_gradients(dtype_of(self.plan.precision.reduce_dtype))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._explaining(), self.weights.shards.paused():
            return super().training_step(*args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.weights.shards.paused():
            return super().optimizer_step(*args, **kwargs)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if (explained := explain(error, self.module_name, self.plan.strategy.name)) is not None:
                raise explained from error
            if self.sharded.tensor_parallel is not None:
                self.sharded.tensor_parallel.explain(error)
            raise

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.backwards.begin_batch()
        self._scalars.hold_hooks()
        take_new_shards(self.optimizers)
        if self.sharded.tensor_parallel is not None:
            self.sharded.tensor_parallel.begin_batch()
        super().on_train_batch_start(batch, batch_idx)

    def _note_step(self, *_: Any) -> None:
        super()._note_step()
        self.backwards.reshard()  # a layer that is still gathered, for a hook, say, would use its old weights

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Do not reduce gradients inside. Lightning's version needs `no_sync`, which FSDP2 does not have."""
        self._sync_is_blocked = True
        try:
            with fsdp_gathering.switched_off(self.backwards.layers, self._reduction):
                yield
        finally:
            self._sync_is_blocked = False

    @property
    def _reduction(self) -> str:
        """FSDP2's switch for what waits until the last micro-batch of a step.

        Without `defer_gradient_sync` that is only the reduction over `replicate`, and the partial sums are sharded.
        """
        return "set_requires_gradient_sync" if self.plan.strategy.defer_gradient_sync else "set_requires_all_reduce"

    def _make_sharded_state(self, module: LightningModule) -> DTensorState:
        return DTensorState(module, lambda: self.optimizers, lambda: fsdp_gathering.free_gathered(module))


def _do_not_flatten() -> None:
    """Replace `RNNBase.flatten_parameters`, which copies the gathered weights into one buffer for cuDNN, once.

    Weights that FSDP2 gathers later would not reach that buffer: the RNN would use those of its first step for ever.
    """


def _reduce_unused_as_zero(group: Any, before_reducing: Callable[[], None]) -> None:
    """Give weights that took no part on this rank zero gradients, so that all ranks reduce equally many numbers.

    A group of weights that no rank has run is left alone, as FSDP2 does.
    """
    pre_backward, post_backward = group.pre_backward, group.post_backward
    runs = False  # in this step

    def begin(*args: Any) -> None:
        nonlocal runs
        runs = True
        pre_backward(*args)

    def end(*args: Any) -> None:
        nonlocal runs
        if group.reduce_grads and runs:
            runs = False
            before_reducing()
            for parameter in group.fsdp_params:
                weight = parameter._unsharded_param
                if not weight.requires_grad or parameter.unsharded_accumulated_grad is not None:
                    continue
                if weight.grad is None:
                    # torch.zeros_like would refuse a weight that was gathered in fp8
                    weight.grad = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        post_backward(*args)

    group.pre_backward, group.post_backward = begin, end
