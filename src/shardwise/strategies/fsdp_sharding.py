"""How FSDP2 shards a module: `shard` has the whole order. Parameters, gradients and optimizer state are sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shardwise.distributed.mesh import Mesh, broadcast_from_rank_zero
from shardwise.distributed.parameters import keep_notes
from shardwise.errors import ConfigError, class_name
from shardwise.parallel.parallelize import refuse_functional_calls, return_passed_tensors, roots_of
from shardwise.parallel.precision import dtype_of, mixed_precision_policy
from shardwise.parallel.tensor_parallel import TensorParallel
from shardwise.plan import Plan
from shardwise.strategies import fsdp_gathering, fsdp_step
from shardwise.strategies.fsdp_step import Scalars
from shardwise.strategies.fsdp_symmetric_memory import copy_between_ranks, let_compiler_copy
from shardwise.strategies.fsdp_views import ShardsInHooks
from shardwise.strategies.whole_weights import InnerBackwards, show_outputs
from shardwise.weights.initialize import Materializer


class FsdpSharding:
    """Shards a strategy's module, and knows what FSDP2 does with its layers in a step.

    Each unit is gathered just before it runs and freed after; its gradients are reduce-scattered as soon as they exist.
    """

    def __init__(self, strategy: Any) -> None:
        module: LightningModule = strategy.module
        plan: Plan = strategy.plan
        mesh: Mesh = strategy.mesh
        self.strategy, self.module, self.plan, self.mesh = strategy, module, plan, mesh
        self.divided: TensorParallel | None = None  # layers over a tensor axis
        self._blocks_reduction = False  # whether the current micro-batch's gradients are not reduced yet

    def shard(self) -> None:
        """Make, initialise and shard one unit after the other, so that no rank ever holds the whole model."""
        strategy, module, plan, units = self.strategy, self.module, self.plan, self.strategy.units
        if not plan.topology.is_data_parallel_only:
            strategy.share_batches()
        self.divided = self.divide_layers()
        strategy.prepare_float8(module, self.divided)
        if self.divided is not None:
            self.divided.wrap(module)
        if strategy.shared is not None:
            strategy.shared.share_draws(units, self.divided)
        refuse = None if self.divided is None else partial(fsdp_step.refuse_writes, strategy.module_name)
        strategy.weights.take_shards(ShardsInHooks(module, refuse))
        strategy.parallelize(module, units, casts_inputs=False)
        fsdp_gathering.check_prefetch(module, units, plan)
        materializer = Materializer(module, strategy.root_device, plan.seed, self.mesh.group("stage"))
        policy = mixed_precision_policy(plan.precision, is_root=False)
        with fsdp_gathering.one_mesh_for_all_units(plan):
            for _, unit in units.modules:
                if self.materialize_unit(materializer, unit):
                    self._cut(unit)
                    self._shard_layer(unit, policy, plan.strategy.reshard_after_forward)
        self.materialize_rest(materializer)
        self._cut(module)
        self._shard_roots()
        fsdp_gathering.set_prefetch(module, units, plan)
        if plan.strategy.symmetric_memory:
            copy_between_ranks([layer for layer in module.modules() if isinstance(layer, FSDPModule)], plan)
        self._watch_layers()
        if strategy.float8 is not None:  # before the roots begin: FSDP2 looks then who gathers in fp8
            strategy.float8.gather(change_within_steps=not module.automatic_optimization)
        if not module.automatic_optimization:
            self.begin_roots()  # before an optimizer is toggled and some parameters need no gradients
        for parameter in () if self.divided is None else self.divided.divided():
            strategy.planned_precision.divide(parameter, self.mesh.group("tensor"))
        self.backwards = InnerBackwards(module, module.automatic_optimization)
        broadcast_from_rank_zero(list(module.buffers()), self.mesh.group("stage"))
        self.begin_roots()
        ranks = self.mesh.group("loss") if plan.topology.loss_size > 1 else None
        self.scalars = Scalars(module, ranks, dtype_of(plan.precision.reduce_dtype))

    def divide_layers(self) -> TensorParallel | None:
        """Find out what tensor parallelism divides. Weights are cut when they are there."""
        if self.plan.topology.tensor == 1:
            return None
        group, overlaps = self.mesh.group("tensor"), bool(self.plan.compile.overlaps_peers)
        if overlaps:
            let_compiler_copy(group)
        by_sample = self.plan.topology.pipeline == 1
        divided = TensorParallel(self.module, group, by_sample=by_sample, overlaps=overlaps)
        self.strategy.sharded.divide(divided)
        return divided

    def materialize_unit(self, materializer: Materializer, unit: nn.Module) -> bool:
        """Give a unit its memory and initial values. Returns whether this rank has a part of it."""
        materializer.materialize(unit)
        return True

    def materialize_rest(self, materializer: Materializer) -> None:
        """Do the same for all layers outside units."""
        materializer.materialize(self.module)

    def _cut(self, layer: nn.Module) -> None:
        if self.divided is not None:
            self.divided.cut(layer)

    def _shard_roots(self) -> None:
        """Shard what is outside of units."""
        roots = roots_of(self.module)
        within = {id(p) for root in roots for p in root.parameters()}
        outside = [p for p in self.module.parameters() if id(p) not in within and not kept_whole(p)]
        if outside:  # it optimizes by hand
            raise ConfigError(
                f"{class_name(self.module)} optimizes by hand and owns parameters itself: {self.plan.strategy.name} "
                f"would go on with their old values within a step; move them into a layer, or use strategy=ddp"
            )
        policy = mixed_precision_policy(self.plan.precision, is_root=True)
        for root in roots:
            if not isinstance(root, FSDPModule) and any(True for _ in root.parameters()):
                self._shard_layer(root, policy, None if root is self.module else True)

    def _shard_layer(self, layer: nn.Module, policy: MixedPrecisionPolicy, reshard: bool | int | None) -> None:
        before = dict(layer.named_parameters())
        fsdp_gathering.allow_any_layout(type(layer))
        whole = {p for p in layer.parameters() if kept_whole(p)}
        fully_shard(
            layer, mesh=self.strategy.device_mesh, mp_policy=policy, ignored_params=whole, reshard_after_forward=reshard
        )
        refuse_functional_calls([layer], "FSDP gathers its weights; use strategy=ddp", lambda p: isinstance(p, DTensor))
        for name, shard in layer.named_parameters():
            if shard is not before[name]:
                keep_notes(shard, before[name])
        if layer is not self.module:
            return_passed_tensors(layer)
            show_outputs(layer)

    def _watch_layers(self) -> None:
        """Know each collective before it begins, and reduce gradients of unused weights as zero."""
        order = self.strategy.order
        for name, layer in self.module.named_modules():
            if isinstance(layer, FSDPModule) and (group := layer._get_fsdp_state()._fsdp_param_group):
                if self.strategy.world_size > 1:
                    name = name or "what is outside of units"
                    fsdp_gathering.before_gathering(group, order.add(f"gathers {name}"))
                    _reduce_unused_as_zero(group, order.add(f"reduces the gradients of {name}"))
                self.strategy.weights.shards.watch_hooks(group)
            if isinstance(layer, nn.RNNBase):
                layer.flatten_parameters = _do_not_flatten  # type: ignore[method-assign]

    def begin_roots(self) -> None:
        """Do what FSDP2 does when a root first runs. A layer that a hook runs before would be taken for a root."""
        for root in roots_of(self.module):
            if isinstance(root, FSDPModule):
                root._get_fsdp_state()._lazy_init()

    # Steps

    def begin_batch(self) -> None:
        self.backwards.begin_batch()
        self.scalars.hold_hooks()
        if self.divided is not None:
            self.divided.begin_batch()

    def settle_last(self) -> None:
        """`settle_gradients`, behind the last backward pass of a step."""
        if not self._blocks_reduction:
            self.settle_gradients()

    def settle_gradients(self) -> None:
        """Do what FSDP2 does not do for gradients, once a step, after the last backward pass. Collective."""
        self.scalars.average()
        if self.divided is not None:
            self.divided.sum_gradients(dtype_of(self.plan.precision.reduce_dtype))

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        """Inside, what can wait for the last micro-batch of a step is not reduced.

        Without `defer_gradient_sync` that is only the reduction over `replicate`, and the partial sums are sharded.
        """
        defers = self.plan.strategy.defer_gradient_sync
        switch = "set_requires_gradient_sync" if defers else "set_requires_all_reduce"
        self._blocks_reduction = True
        try:
            with fsdp_gathering.switched_off(self.backwards.layers, switch):
                yield
        finally:
            self._blocks_reduction = False


def kept_whole(parameter: nn.Parameter) -> bool:
    """Whether FSDP2 cannot shard `parameter`, because it has no dimension or no elements. Every rank keeps it."""
    return parameter.ndim == 0 or parameter.numel() == 0


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
