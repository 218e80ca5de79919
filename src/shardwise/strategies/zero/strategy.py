"""`zero1`, `zero2` and `zero3`: DeepSpeed's engine, made to agree with the other strategies.

ZeRO-1 shards the optimizer state over all ranks, ZeRO-2 the gradients as well, ZeRO-3 the parameters too. In low
precision the module's own parameters become the 16-bit copies, and fp32 masters live sharded in DeepSpeed's optimizer.
By itself DeepSpeed (or Lightning with it) would divide the loss twice under accumulation, reduce in 16 bits, start its
masters from rounded weights and skip a step in silence. This package undoes each of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from shardwise.distributed.mesh import broadcast_from_rank_zero, gather_in_order
from shardwise.errors import ConfigError
from shardwise.optim.deepspeed import import_deepspeed
from shardwise.optim.optimizers import order_alike
from shardwise.parallel.parallelize import refuse_functional_calls
from shardwise.parallel.precision import dtype_of
from shardwise.plan import Plan
from shardwise.step.precision_plugin import LOSS_SCALE
from shardwise.strategies.base import PlannedStrategy
from shardwise.strategies.whole_weights import weights_are_sharded
from shardwise.strategies.zero.internals import (
    before_collectives,
    before_freeing,
    count_elements,
    full_shapes,
    keep_gradients_until_reduced,
    leaf_gradients_reduced_singly,
    release_engine,
    scalars_as_vectors,
    without_broadcast,
    without_nested_tensors,
)
from shardwise.strategies.zero.optimizer import FrozenUnderZero, ParameterGroups, StepHooks
from shardwise.strategies.zero.precision import GradientsOutOfReach, ZeroPrecision
from shardwise.strategies.zero.refusals import check_support, refuse_idle, refuse_inner_backward, refuse_objects
from shardwise.strategies.zero.state import ZeroState
from shardwise.strategies.zero.unused_parameters import LastGradients, gathered_as_one, touch_all
from shardwise.strategies.zero.weights import ZeroWeights
from shardwise.weights.initialize import Materializer


class ZeroStrategy(PlannedStrategy, DDPStrategy):
    """Uses DDPStrategy for the processes and their group only. DeepSpeed wraps the module."""

    weights_class = ZeroWeights
    weights: ZeroWeights
    groups: ParameterGroups | None = None  # of the optimizer, in training

    def __init__(self, plan: Plan) -> None:
        super().__init__(timeout=timedelta(minutes=plan.strategy.timeout_minutes))
        self._use(plan, ZeroPrecision)

    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None and self.accelerator is not None
        self.accelerator.setup(trainer)
        deepspeed = import_deepspeed(self.plan)
        deepspeed.init_distributed(dist_init_required=False)
        training = trainer.state.fn == TrainerFn.FITTING
        config = engine_config(self.plan, training)
        self._begin_setup(module)
        self.parallelize(module, self.units, casts_inputs=True)
        initial = InitialValues(self.plan, self.mesh.group("world"))
        self._make(deepspeed, module, config, initial if training and self.plan.precision.is_mixed else None)
        with full_shapes(module):
            optimizers, self.lr_scheduler_configs = _init_optimizers_and_lr_schedulers(module) if training else ([], [])
        if not module.automatic_optimization or len(optimizers) > 1:
            what = f"has {len(optimizers)} optimizers" if module.automatic_optimization else "optimizes by hand"
            reason = self.plan.capabilities.manual_steps
            raise ConfigError(f"{type(module).__name__} {what}, which {self.plan.strategy.name} cannot do: {reason}")
        order_alike(module, optimizers, self.file_group())
        group_names: list[list[str]] = []
        if training:
            check_support(self, optimizers[0])
            names = {id(p): name for name, p in module.named_parameters()}
            group_names = [[names[id(p)] for p in group["params"]] for group in optimizers[0].param_groups]
            for group in optimizers[0].param_groups:  # DeepSpeed cannot shard a parameter without elements
                group["params"] = [p for p in group["params"] if count_elements(p)]
        trained = [p for p in module.parameters() if p.requires_grad and count_elements(p)] if training else []
        with leaf_gradients_reduced_singly(), without_broadcast():
            self.model, engine_optimizer, _, _ = deepspeed.initialize(
                model=module,
                model_parameters=trained,
                optimizer=optimizers[0] if training else None,
                config=config,
                dist_init_required=False,
            )
        self.zero_precision.use(self.model, partial(weights_are_sharded, self.module_name, self.plan.strategy.name))
        self.closing.add(partial(release_engine, self.model))
        before_collectives(self.model, module, self.order.add)
        if self.plan.zero_stage == 3:
            refuse_functional_calls(module.modules(), "zero3 gathers its own weights; use strategy=ddp", lambda _: True)
            self.closing.add(without_nested_tensors())
        if training:
            self._begin_training(engine_optimizer, group_names, initial)
        self._end_setup()
        self.barrier()

    def _begin_training(self, engine_optimizer: Any, group_names: list[list[str]], initial: InitialValues) -> None:
        units = {unit for _, unit in self.units.modules}
        if self.plan.strategy.find_unused_parameters:
            touch_all(self.module, units, self.plan.zero_stage)
        if self.plan.zero_stage == 3:
            before_freeing(engine_optimizer, partial(refuse_inner_backward, self))
            if not self.plan.strategy.find_unused_parameters:
                self.zero_precision.after_backward(partial(refuse_idle, self, LastGradients(engine_optimizer)))
        keep_gradients_until_reduced(engine_optimizer)
        self.optimizers = [engine_optimizer]
        self.zero_state.use(engine_optimizer, group_names)
        name = self.plan.strategy.name
        self.step.freeze(FrozenUnderZero(self.zero_state, name))
        self.groups = ParameterGroups(self.zero_state, self.module_name, name)
        step_hooks = StepHooks(self.groups.optimizer, name, lambda where: GradientsOutOfReach(where, name))
        self.zero_precision.call_around_steps(step_hooks)
        self.zero_precision.watch_gradients(engine_optimizer)
        initial.fill(self.zero_state.master_parts(), self.zero_state.trained_names(), self.root_device)

    def _make_sharded_state(self, module: LightningModule) -> ZeroState:
        # Before an average, for example, replaces the weights, what hooks have written into them is checked.
        return ZeroState(module, self.plan.zero_stage, self.weights.check_evaluation)

    @property
    def zero_state(self) -> ZeroState:
        assert isinstance(self.sharded, ZeroState)
        return self.sharded

    @property
    def zero_precision(self) -> ZeroPrecision:
        assert isinstance(self.precision_plugin, ZeroPrecision)
        return self.precision_plugin

    def _make(
        self, deepspeed: Any, module: LightningModule, config: dict[str, Any], initial: InitialValues | None
    ) -> None:
        """Make the parameters, initialised as under every strategy. ZeRO-3 shards each unit before the next is made.

        `initial` keeps what the masters begin with; None: there will be none, or the parameters are the masters.
        """
        materializer = Materializer(module, self.root_device, self.plan.seed, self.mesh.group("world"))
        precision, three = self.plan.precision, self.plan.zero_stage == 3
        empty = [name for name, p in module.named_parameters() if not p.numel()]
        if three and empty:
            raise ConfigError(
                f"{self.module_name} has parameters without elements ({', '.join(empty[:4])}): "
                f"{self.plan.strategy.name} cannot gather them; leave them out, or use strategy=fsdp or zero2"
            )
        done: set[int] = set()
        for name, unit in [*self.units.modules, ("", module)] if three else [("", module)]:
            materializer.materialize(unit)
            fresh = [(n, p) for n, p in unit.named_parameters(name) if id(p) not in done]
            done.update(id(p) for _, p in fresh)
            if precision.is_mixed:
                for n, p in fresh:
                    if initial is not None:
                        initial.keep(n, p)
                    p.data = p.data.to(dtype_of(precision.compute_dtype))
            if three:
                if self.state.is_training:
                    refuse_objects(unit, self.plan.strategy.name)
                if unit is not module:
                    deepspeed.utils.set_z3_leaf_module(unit, True)  # DeepSpeed gathers it as a whole, as FSDP does
                elif self.plan.strategy.find_unused_parameters:
                    for layer in gathered_as_one(module, {unit for _, unit in self.units.modules}):
                        deepspeed.utils.set_z3_leaf_module(layer, True)
                with scalars_as_vectors(unit):
                    deepspeed.zero.Init(
                        module=unit, config_dict_or_path=config, dtype=dtype_of(precision.compute_dtype)
                    )
        broadcast_from_rank_zero(list(module.buffers()), self.mesh.group("world"))

    def _run_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with self.weights.around_step(name):
            return super()._run_step(name, *args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
        self.order.end()
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.groups is not None:
            self.groups.check()
        return super().optimizer_step(*args, **kwargs)

    def on_validation_end(self) -> None:
        """Check the weights, after the hooks of module and callbacks."""
        super().on_validation_end()
        self.weights.check_evaluation()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Tell DeepSpeed that the window goes on. ZeRO-1 reduces at its end, ZeRO-2 and 3 in every micro-batch."""
        self.engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.engine.set_gradient_accumulation_boundary(True)

    @property
    def engine(self) -> Any:
        return self.model

    scales_by_gradient = False  # the engine starts its backward pass by itself


# Translates the Plan into DeepSpeed's config.


def engine_config(plan: Plan, training: bool) -> dict[str, Any]:
    """Make DeepSpeed's config: a new dict for each call, since DeepSpeed writes into it."""
    strategy, precision, cuda = plan.strategy, plan.precision, plan.accelerator == "cuda"
    zero: dict[str, Any] = {
        "stage": plan.zero_stage,
        "reduce_bucket_size": strategy.reduce_bucket_elements,
        "overlap_comm": cuda and strategy.overlap_comm,  # there are no streams on the CPU
        "contiguous_gradients": True,
        "round_robin_gradients": False,  # where a parameter's master lies is the order of its group
    }
    if plan.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": strategy.prefetch_bucket_elements,
            "stage3_param_persistence_threshold": strategy.persistence_threshold_elements,
            "stage3_max_live_parameters": strategy.max_live_elements,
            "stage3_max_reuse_distance": strategy.max_reuse_distance_elements,
            "sub_group_size": strategy.sub_group_elements,
        }
    else:
        zero["allgather_bucket_size"] = strategy.allgather_bucket_elements
    if strategy.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": cuda}
    if strategy.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": cuda}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.accumulate_grad_batches,
        "gradient_clipping": plan.gradient_clip_val or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        # With this ZeRO-1 in bf16 uses DeepSpeed's BF16_Optimizer, which also accumulates gradients in fp32.
        "data_types": {"grad_accum_dtype": "bf16" if precision.parameter_dtype == "bfloat16" else "fp32"},
        "steps_per_print": None,
    }
    if training or plan.zero_stage == 3:
        config["zero_optimization"] = zero
    if precision.compute_dtype == "bfloat16":
        true = not precision.is_mixed
        config["bf16"] = {
            "enabled": True,
            "check_grad_overflow": False,  # see ZeroPrecision.watch_gradients
            "immediate_grad_update": True,  # adds 16-bit gradients to the fp32 sum at once
            "bf16_master_weights_and_grads": true,
            "bf16_optimizer_states": true,
        }
    if precision.compute_dtype == "float16":
        config["fp16"] = {
            "enabled": True,
            "initial_scale_power": round(math.log2(LOSS_SCALE["init_scale"])),
            "loss_scale_window": LOSS_SCALE["growth_interval"],
            "hysteresis": 1,
        }
    return config


# The fp32 values that DeepSpeed's masters begin with: it would make them from the 16-bit copies, which are rounded.


class InitialValues:
    """The ranks of `group` share the values of every parameter until there are masters, so that none holds them all."""

    def __init__(self, plan: Plan, group: dist.ProcessGroup) -> None:
        self.group = group
        self.sharded_alike = plan.zero_stage == 3  # a rank's masters are these same shares
        # ZeRO-1 and 2 need the GPU for whole parameters, and with offloading the masters will be on the host, too.
        self.on_host = not self.sharded_alike or plan.strategy.offload_optimizer
        self._shares: dict[str, tuple[int, Tensor]] = {}  # name → elements of each share, this rank's values

    def keep(self, name: str, parameter: nn.Parameter) -> None:
        """Copy this rank's share of a parameter."""
        size = -(-parameter.numel() // self.group.size())
        values = parameter.detach().flatten()[size * self.group.rank() :][:size]
        self._shares[name] = size, values.to("cpu" if self.on_host else values.device, copy=True)

    def fill(self, masters: Iterator[tuple[str, int, Tensor]], trained: set[str], device: torch.device) -> None:
        """Copy the values into this rank's `masters` (name, first element, storage), and forget them. Collective.

        `trained`: the names of all parameters that have masters. `device`: the group's.
        """
        mine = {name: (start, master) for name, start, master in masters}
        while self._shares:
            name = next(iter(self._shares))  # in the same order on every rank
            size, values = self._shares.pop(name)
            begin = size * self.group.rank()
            if name in trained and not self.sharded_alike:
                begin, values = 0, gather_in_order(self.group, F.pad(values.to(device), (0, size - values.numel())))
            if name in mine:
                start, master = mine[name]
                master.copy_(values[start - begin : start - begin + master.numel()])
