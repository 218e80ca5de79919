"""`zero1`, `zero2` and `zero3`: DeepSpeed's engine, made to agree with the other strategies.

ZeRO-1 shards the optimizer state over all ranks, ZeRO-2 the gradients as well, ZeRO-3 the parameters too. In low
precision the module's own parameters become the 16-bit copies, and fp32 masters live sharded in DeepSpeed's optimizer.
Left to itself DeepSpeed (or Lightning with it) divides the loss twice under accumulation, reduces in 16 bits, starts
its masters from rounded weights and skips a step in silence: each is undone here, where it is named.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from shardwise.checkpoint.chunks import range_of, slice_of
from shardwise.checkpoint.state import Held, make_like, restore
from shardwise.distributed.collectives import broadcast_from_rank_zero
from shardwise.errors import ConfigError
from shardwise.optim.deepspeed import import_deepspeed
from shardwise.optim.optimizers import treats_weights_one_by_one
from shardwise.parallel.precision import dtype_of
from shardwise.plan import Plan
from shardwise.step.precision_plugin import LOSS_SCALE, PlannedPrecision
from shardwise.strategies.common import PlannedStrategy
from shardwise.strategies.whole_weights import gives_tensors, tensors_in_objects
from shardwise.weights.initialize import Materializer

# Elements reduced or gathered at a time: DDP's 25 MiB would be many small ones, DeepSpeed's default takes 2 GB.
_BUCKET = 25_000_000


class ZeroStrategy(PlannedStrategy, DDPStrategy):
    """Of DDPStrategy only the processes and their group are used; the wrapping is DeepSpeed's."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(timeout=timedelta(minutes=plan.strategy.timeout_minutes))
        self._use(plan, ZeroPrecision(plan))
        self._names: list[list[str]] = []  # of what each group of the optimizer trains
        self._initial: dict[str, tuple[int, Tensor]] = {}  # fp32 weights until the masters have them: (start, values)

    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None and self.accelerator is not None
        self.accelerator.setup(trainer)
        deepspeed = import_deepspeed(self.plan)
        deepspeed.init_distributed(dist_init_required=False)
        training = trainer.state.fn == TrainerFn.FITTING
        config = engine_config(self.plan, training)
        self._find_units(module)
        self._parallelize(module, casts_inputs=True)
        self._make(deepspeed, module, config)
        with _shapes_shown(module):
            optimizers, self.lr_scheduler_configs = _init_optimizers_and_lr_schedulers(module) if training else ([], [])
        if not module.automatic_optimization or len(optimizers) > 1:
            what = f"has {len(optimizers)} optimizers" if module.automatic_optimization else "optimizes by hand"
            raise ConfigError(
                f"{type(module).__name__} {what}, which {self.plan.strategy.name} cannot do: DeepSpeed's engine owns "
                f"one optimizer and its step; use strategy=ddp or fsdp"
            )
        if training:
            self._check_own_ways(module, optimizers[0])
            names = {id(p): name for name, p in module.named_parameters()}
            for group in optimizers[0].param_groups:  # DeepSpeed cannot take a parameter without elements
                group["params"] = [p for p in group["params"] if _count(p)]
            self._names = [[names[id(p)] for p in group["params"]] for group in optimizers[0].param_groups]
        with _reduced_one_by_one(), _weights_not_sent():
            self.model, self.engine_optimizer, _, _ = deepspeed.initialize(
                model=module,
                model_parameters=[p for p in module.parameters() if p.requires_grad and _count(p)] if training else [],
                optimizer=optimizers[0] if training else None,
                config=config,
                dist_init_required=False,
            )
        if training and self.plan.strategy.find_unused_parameters:
            if self.plan.strategy.zero_stage < 3:
                _touch(module, list(module.parameters()))
            else:  # a layer's weights are there while it runs
                wholes = list(_gathered_as_one(module, {unit for _, unit in self.units.modules}))
                inside = {layer for whole in wholes for layer in whole.modules()}
                for whole in wholes:
                    _touch(whole, list(whole.parameters()))
                for layer in set(module.modules()) - inside:
                    _touch(layer, list(layer.parameters(recurse=False)))
        if training and self.plan.strategy.zero_stage == 3:
            self._refuse_inner_backward()
        if training:
            self.optimizers = [self.engine_optimizer]
            self._watch_gradients()
            for name, start, part in self._parts() if self._initial else ():
                before, values = self._initial[name]
                part.copy_(values[start - before : start - before + part.numel()])
            self._initial = {}
        self._take_initial_weights()
        self.barrier()

    def _refuse_inner_backward(self) -> None:
        """ZeRO-3 frees a layer's weights behind a backward pass, and does not gather them for a second one."""
        offload = self.engine_optimizer.parameter_offload
        free = offload.post_sub_module_backward_function

        def unless_within_a_step(*args: Any, **kwargs: Any) -> Any:
            assert self.lightning_module is not None
            if self.lightning_module.trainer.training and not self.planned_precision.is_in_backward:
                raise ConfigError(
                    f"{self.module_name}.training_step takes a gradient (torch.autograd.grad), and behind that the "
                    f"weights are gone under {self.plan.strategy.name}; use strategy=fsdp, zero2 or ddp"
                )
            return free(*args, **kwargs)

        offload.post_sub_module_backward_function = unless_within_a_step

    def _refuse_objects(self, layer: nn.Module) -> None:
        """ZeRO-3 gathers the weights of a layer when a gradient comes to what it gave: it must find these tensors."""

        def look(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not torch.is_grad_enabled() or gives_tensors(output):
                return
            if any(tensor.grad_fn is not None for tensor in tensors_in_objects((output, args, kwargs))):
                raise ConfigError(
                    f"{type(layer).__name__} passes tensors on inside an object, where {self.plan.strategy.name} does "
                    f"not find them; pass tensors, tuples or dicts, or use strategy=fsdp, zero2 or ddp"
                )

        layer.register_forward_hook(look, with_kwargs=True)

    def _watch_gradients(self) -> None:
        """DeepSpeed throws gradients away when their norm is not finite: note whose it was, while they are there. And
        let a step in bf16 be thrown away by its norm, too, without `check_grad_overflow`'s second look at each."""
        optimizer, precision = self.engine_optimizer, self.planned_precision
        throws_away = "clear_hp_grads" if hasattr(optimizer, "clear_hp_grads") else "zero_grad"
        throw_away = getattr(optimizer, throws_away)

        def noting(*args: Any, **kwargs: Any) -> Any:
            if optimizer.overflow and not precision.gradients:
                precision.gradients = list(_gradient_norms(optimizer))
            return throw_away(*args, **kwargs)

        setattr(optimizer, throws_away, noting)
        if self.plan.precision.loss_scaling:  # the guard says when it has been halved too often
            optimizer.loss_scaler.min_scale, optimizer.loss_scaler.raise_error_at_min_scale = 2.0**-24, False
        if self.plan.precision.compute_dtype == "bfloat16" and hasattr(optimizer, "check_grad_overflow"):
            take_norm = optimizer.scaled_global_norm

            def judged(*args: Any, **kwargs: Any) -> Any:
                optimizer.check_grad_overflow = True  # it is asked once before the norm is taken, and once after
                return take_norm(*args, **kwargs)

            optimizer.scaled_global_norm = judged

    def _check_own_ways(self, module: LightningModule, optimizer: Optimizer) -> None:
        """Refuses what would run elsewhere and be passed over, or give other numbers, here."""
        name = self.plan.strategy.name
        if hooks := [hook for hook in ("backward", "configure_gradient_clipping") if is_overridden(hook, module)]:
            raise ConfigError(
                f"{self.module_name} has its own {', '.join(hooks)}, and under {name} gradients are in DeepSpeed's "
                f"hands, out of reach: leave it out, or use strategy=ddp or fsdp"
            )
        if not treats_weights_one_by_one(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} is not known to treat every weight by itself, and DeepSpeed gives it flat "
                f"pieces without rows or columns: use AdamW or SGD, strategy=ddp, or, if it does, set is_elementwise = "
                f"True on it"
            )

    def _make(self, deepspeed: Any, module: LightningModule, config: dict[str, Any]) -> None:
        """The parameters, initialised as everywhere. ZeRO-3 keeps a shard of each unit before the next is made."""
        materializer = Materializer(module, self.root_device, self.plan.seed)
        precision, three = self.plan.precision, self.plan.strategy.zero_stage == 3
        empty = [name for name, p in module.named_parameters() if not p.numel()]
        if three and empty:
            raise ConfigError(
                f"{self.module_name} has parameters without elements ({', '.join(empty[:4])}): "
                f"{self.plan.strategy.name} cannot gather them; leave them out, or use strategy=fsdp or zero2"
            )
        done: set[int] = set()
        for name, unit in [*self.units.modules, ("", module)] if three else [("", module)]:
            materializer.place(unit)
            fresh = [(n, p) for n, p in unit.named_parameters(name) if id(p) not in done]
            done.update(id(p) for _, p in fresh)
            if precision.is_mixed:
                for n, p in fresh:
                    share = -(-p.numel() // dist.get_world_size()) if three else p.numel()
                    start = share * dist.get_rank() if three else 0
                    values = p.detach().flatten()[start : start + share]
                    self._initial[n] = (start, values.clone() if three else values.cpu())
                    p.data = p.data.to(dtype_of(precision.compute_dtype))
            if three:
                if self._is_training:
                    self._refuse_objects(unit)
                if unit is not module:
                    deepspeed.utils.set_z3_leaf_module(unit, True)  # gathered as a whole, as FSDP does
                elif self.plan.strategy.find_unused_parameters:
                    for layer in _gathered_as_one(module, {unit for _, unit in self.units.modules}):
                        deepspeed.utils.set_z3_leaf_module(layer, True)
                with _with_a_dimension(unit):
                    deepspeed.zero.Init(
                        module=unit, config_dict_or_path=config, dtype=dtype_of(precision.compute_dtype)
                    )
        broadcast_from_rank_zero(list(module.buffers()))

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """ZeRO-1 reduces at the window's end; ZeRO-2 and 3 in every micro-batch, and step at its end."""
        self.engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.engine.set_gradient_accumulation_boundary(True)

    @property
    def engine(self) -> Any:
        return self.model

    hides_weights = True
    _before_evaluation: dict[str, float] | None = None  # the norms of trained weights

    @contextmanager
    def whole_parameters(self, hook: str) -> Iterator[None]:
        """What the hook writes into a frozen parameter, an average say, stays. The trained ones are DeepSpeed's, whose
        next step writes over them: other weights for an evaluation are to be put back at its end."""
        assert self.lightning_module is not None
        trained = {n: p for n, p in self.lightning_module.named_parameters() if p.requires_grad}
        with self._gathered(list(trained.values())):
            before = _norms(trained)
            yield
            after = _norms(trained)
        if hook.startswith(("on_validation", "on_test", "on_predict")):
            self._before_evaluation = self._before_evaluation or before
        else:
            self._refuse_writes(before, after, hook)

    def on_validation_end(self) -> None:
        """Behind the hooks of module and callbacks."""
        assert self.lightning_module is not None
        super().on_validation_end()
        self._check_evaluation()

    def _check_evaluation(self) -> None:
        assert self.lightning_module is not None
        before, self._before_evaluation = self._before_evaluation, None
        if before is not None:
            trained = {n: p for n, p in self.lightning_module.named_parameters() if p.requires_grad}
            with self._gathered(list(trained.values())):
                self._refuse_writes(before, _norms(trained), "validation, and does not put back what was there")

    def _refuse_writes(self, before: dict[str, float], after: dict[str, float], where: str) -> None:
        # Not a number is no other value than before.
        changed = [name for name, norm in after.items() if norm != before[name] and not math.isnan(norm)]
        if changed and self._is_training:
            raise ConfigError(
                f"{self.module_name} or a callback writes into {', '.join(changed[:4])} in {where}: under "
                f"{self.plan.strategy.name} trained weights are in DeepSpeed's hands, and this would be lost; use "
                f"strategy=ddp or fsdp"
            )

    @contextmanager
    def _gathered(self, trained: list[nn.Parameter]) -> Iterator[None]:
        if self.plan.strategy.zero_stage < 3:
            yield
            return
        from deepspeed.runtime.zero import GatheredParameters

        assert self.lightning_module is not None
        absent = [p for p in trained if p.ds_status.name != "AVAILABLE"]  # type: ignore[attr-defined]
        frozen = [p for p in self.lightning_module.parameters() if not p.requires_grad and hasattr(p, "ds_id")]
        there = [p for p in trained if p.ds_status.name == "AVAILABLE"]  # type: ignore[attr-defined]
        with GatheredParameters([*frozen, *absent], modifier_rank=0):
            yield
        for p in there:  # a small one that DeepSpeed keeps whole: its shard is what is gathered the next time
            shard = p.ds_tensor  # type: ignore[attr-defined]
            mine = p.detach().flatten()[dist.get_rank() * shard.numel() :][: shard.numel()]
            shard.data[: mine.numel()].copy_(mine)

    # Masters

    def _parts(self) -> Iterator[tuple[str, int, Tensor]]:
        """Name, first element and storage of this rank's range of every trainable fp32 master, which are flat."""
        assert self.lightning_module is not None
        trained = self._trained()
        for name, p in self.lightning_module.named_parameters():
            if name not in trained:
                continue
            if self.plan.strategy.zero_stage == 3:
                storage, _ = self.engine_optimizer._get_fp32_opt_state_partition(p, release_swap_buffers=False)
                start = storage.numel() * dist.get_rank()
                inside = min(storage.numel(), p.ds_numel - start)  # type: ignore[attr-defined]
                if inside > 0:  # the rest is padding
                    yield name, start, storage.detach()[:inside]
            elif p._hp_mapping is not None:  # type: ignore[attr-defined]
                yield name, p._hp_mapping.lp_fragment_address.start, p._hp_mapping.hp_fragment.detach()  # type: ignore[attr-defined]

    def _trained(self) -> set[str]:
        """Parameters of which DeepSpeed's optimizer has masters."""
        assert self.lightning_module is not None
        needs = {name for name, p in self.lightning_module.named_parameters() if p.requires_grad}
        return {name for group in self._names for name in group} & needs

    def master_shards(self) -> dict[str, Tensor]:
        return {name: part for name, _, part in self._parts()}

    def masters_changed(self) -> None:
        if not self._is_training:
            return
        self._check_evaluation()  # of other weights, an average's, than those that come now
        optimizer = self.engine_optimizer
        if self.plan.strategy.zero_stage < 3:
            optimizer.update_lp_params()
            return
        for group in range(len(optimizer.fp16_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:  # gathered for good: they must be given up to be gathered anew
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    def full_parameters(self) -> dict[str, Tensor]:
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        assert self.lightning_module is not None
        whole: dict[str, Tensor] = {}
        trained = self._trained()
        for name, p in self.lightning_module.named_parameters():
            if name in trained:
                master = safe_get_full_fp32_param(p).detach().cpu().clone()
                # of bf16_true's masters it gives copies in fp32
                whole[name] = master.view(getattr(p, "ds_shape", p.shape)).to(self._flats[0].dtype)
            else:
                with GatheredParameters([p], enabled=hasattr(p, "ds_id")):
                    whole[name] = p.detach().cpu().clone()
        return whole

    # Where what a checkpoint holds is: flat ranges of every parameter and of its state

    def held(self) -> Iterator[Held]:
        assert self.lightning_module is not None
        masters = {name: (start, part) for name, start, part in self._parts()} if self._is_training else {}
        trained = self._trained()
        for name, p in self.lightning_module.named_parameters():
            shape = tuple(getattr(p, "ds_shape", p.shape))
            if name in trained and self._is_training:
                if name in masters:
                    start, part = masters[name]
                    yield Held(name, shape, part, partial(range_of, shape, start), True)
            elif hasattr(p, "ds_tensor"):
                flat = p.ds_tensor.data.view(-1)
                start = flat.numel() * dist.get_rank()
                if (inside := min(flat.numel(), p.ds_numel - start)) > 0:  # type: ignore[attr-defined]
                    yield Held(name, shape, flat[:inside], partial(range_of, shape, start), False)
            else:
                yield Held(name, shape, p.detach(), partial(slice_of, p), False)

    def state_of(self, held: Held) -> tuple[int, dict[str, Tensor]]:
        flat, start = self._flat_of(held.values)
        found = {}
        for key, value in self._base.state.get(flat, {}).items():
            if isinstance(value, Tensor) and value.numel() == flat.numel() and value.ndim:
                found[key] = value.view(-1)[start : start + held.values.numel()]
            elif isinstance(value, (Tensor, int, float)):  # DeepSpeed's Adam counts in Python
                found[key] = torch.as_tensor(value, dtype=torch.float32)
        return 0, found

    def make_state(self, held: Held, known: dict[str, TensorStorageMetadata]) -> dict[str, Tensor]:
        flat, start = self._flat_of(held.values)
        state = self._base.state[flat]
        fused = bool(self._base.defaults.get("fused") or self._base.defaults.get("capturable"))
        for key, metadata in known.items():
            if not isinstance(state.get(key), Tensor):
                state[key] = make_like(held, flat, key, metadata, flat.device if fused else torch.device("cpu"))
        end = start + held.values.numel()
        return {key: state[key].view(-1)[start:end] if state[key].ndim else state[key] for key in known}

    def _flat_of(self, part: Tensor) -> tuple[Tensor, int]:
        """The flat master that `part` lies in, and where it begins there."""
        for flat in self._flats:
            start = (part.data_ptr() - flat.data_ptr()) // flat.element_size()
            if 0 <= start < flat.numel() and part.device == flat.device:
                return flat, start
        raise AssertionError("a part of a master that is in none of them")

    def _load_tensors(self, folder: Path, metadata: Metadata, optimizers: bool) -> None:
        if self._is_training:
            super()._load_tensors(folder, metadata, optimizers)
            if type(self._base).__name__ == "DeepSpeedCPUAdam":
                for state in self._base.state.values():
                    state["step"] = int(state.get("step", 0))
            return
        module = self.lightning_module
        assert module is not None
        # No masters without an optimizer: the 16-bit parameters take the values, or their averages.
        weights = "model" if self.plan.ema_decay is None else "average"
        with torch.no_grad():
            restore(self, module, folder, metadata, self._file_group(), optimizers=False, weights=weights)

    def _own_optimizers(self) -> list[Optimizer]:
        return [self._base]

    def _group_names(self) -> list[list[list[str]]]:
        return [self._names]

    @property
    def _base(self) -> Optimizer:
        """The torch optimizer inside DeepSpeed's."""
        base: Optimizer = self.engine_optimizer.optimizer
        return base

    @property
    def _flats(self) -> list[Tensor]:
        optimizer = self.engine_optimizer
        for name in ("fp32_partitioned_groups_flat", "fp32_groups_flat_partition"):  # ZeRO-3; ZeRO-1 in bf16
            if hasattr(optimizer, name):
                return list(getattr(optimizer, name))
        return list(optimizer.single_partition_of_fp32_groups)

    def _loss_scale_state(self) -> dict[str, float]:
        if not self.plan.precision.loss_scaling:
            return {}
        scaler = self.engine_optimizer.loss_scaler
        return {"scale": float(scaler.cur_scale), "good_steps": scaler.cur_iter - scaler.last_overflow_iter - 1}

    def _load_loss_scale(self, saved: dict[str, float]) -> None:
        if self.plan.precision.loss_scaling and saved:
            scaler = self.engine_optimizer.loss_scaler
            scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = saved["scale"], int(saved["good_steps"]), -1


class ZeroPrecision(PlannedPrecision):
    """The engine scales, reduces, clips and steps; its verdict is read back."""

    @property
    def loss_scale(self) -> float | None:
        scaling = self.plan.precision.loss_scaling
        return float(self._engine.optimizer.cur_scale) if scaling and self._engine is not None else None

    _engine: Any = None

    def backward(self, tensor: Tensor, model: LightningModule, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self._engine = model.trainer.strategy.model
        self.is_in_backward = True
        try:
            self._engine.backward(tensor, *args[1:], scale_wrt_gas=False, **kwargs)  # Lightning has divided already
            self.is_in_backward = False
        except RuntimeError as error:
            if "invalid gradient" in str(error) and "got [0]" in str(error):  # of a weight that is not there
                raise model.trainer.strategy._weights_are_sharded() from None  # type: ignore[attr-defined]
            raise

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        result = closure()
        self.let_copies_end()
        self._after_closure(model, optimizer)
        before = self._engine.skipped_steps
        self.gradients = []
        if not self.plan.precision.loss_scaling:
            self._engine.optimizer.check_grad_overflow = False  # see ZeroStrategy._watch_gradients
        self._engine.step()
        self.passed_over = self._engine.skipped_steps > before
        norm = self._engine.get_global_grad_norm()
        self.gradient_norm = torch.as_tensor(float("inf") if norm is None else norm)
        return result

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        with _GradientsOutOfReach("on_after_backward", self.plan.strategy.name):
            return super().post_backward(tensor, module)

    def _after_closure(self, model: LightningModule, optimizer: Any) -> None:
        with _GradientsOutOfReach("on_before_optimizer_step", self.plan.strategy.name):
            super()._after_closure(model, optimizer)

    def _clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """The engine's step does."""


def _gradient_norms(optimizer: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Parameters of which this rank holds gradients in a DeepSpeed optimizer that is about to step, and their norms."""
    if hasattr(optimizer, "fp32_groups_gradients"):
        groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
    elif getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
        for number, norm in optimizer.norm_for_param_grads.items():
            yield optimizer.param_dict[number], torch.as_tensor(float(norm))
        return
    else:
        parts = getattr(optimizer, "params_in_partition", None) or optimizer.fp16_groups
        groups = zip(parts, (optimizer.averaged_gradients.get(i) or [] for i in range(len(parts))), strict=True)
    for parameters, gradients in groups:
        for parameter, gradient in zip(parameters, gradients, strict=False):  # the last may be padding
            yield parameter, torch.linalg.vector_norm(gradient.float())


def _norms(parameters: dict[str, nn.Parameter]) -> dict[str, float]:
    """One number a tensor, by which a write is seen that leaves no other trace: by way of p.data."""
    filled = {name: p.detach() for name, p in parameters.items() if p.numel()}
    if not filled:
        return {}
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(list(filled.values()))])
    return dict(zip(filled, norms.tolist(), strict=True))


@contextmanager
def _shapes_shown(module: LightningModule) -> Iterator[None]:
    """ZeRO-3 leaves parameters of shape (0,); who sorts them into groups by their number of dimensions must see it."""
    hidden = [(p, p.data) for p in module.parameters() if hasattr(p, "ds_shape") and p.shape != p.ds_shape]
    for p, data in hidden:
        p.data = data.new_empty(()).expand(p.ds_shape)
    yield
    for p, data in hidden:
        p.data = data


def _count(parameter: nn.Parameter) -> int:
    """Elements of the whole."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


@contextmanager
def _with_a_dimension(unit: nn.Module) -> Iterator[None]:
    """ZeRO-3 cannot take a parameter of shape (): inside it has one dimension, and ZeRO-3 gathers it without."""
    scalars = [p for p in unit.parameters() if p.ndim == 0 and not hasattr(p, "ds_shape")]
    for p in scalars:
        p.data = p.data.view(1)
    yield
    for p in scalars:
        p.ds_shape = torch.Size()  # type: ignore[attr-defined]


@contextmanager
def _weights_not_sent() -> Iterator[None]:
    """An engine that is made inside takes weights and buffers as they are: all ranks have the same ones already, and
    DeepSpeed cannot send a parameter of shape ()."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    with patch.object(DeepSpeedEngine, "_broadcast_model", lambda engine: None):
        yield


class _Zero(torch.autograd.Function):
    """A zero that depends on every parameter. Made first, it is differentiated last: every gradient is there then."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.shapes = [p.shape for p in parameters]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(torch.zeros_like(gradients[0]).expand(shape) for shape in ctx.shapes)


class _GradientsOutOfReach(TorchFunctionMode):
    """Around a hook: to reach for a parameter's gradient is an error. There is none, or that of one micro-batch."""

    def __init__(self, hook: str, strategy: str) -> None:
        super().__init__()
        self.hook, self.strategy = hook, strategy

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__self__", None) is torch.Tensor.grad and isinstance(args[0], nn.Parameter):
            callers = (frame for frame, _ in traceback.walk_stack(None) if frame.f_code.co_name == self.hook)
            owner = next(
                (type(frame.f_locals["self"]).__name__ + "." for frame in callers if "self" in frame.f_locals), ""
            )
            raise ConfigError(
                f"{owner}{self.hook} looks at gradients, and under {self.strategy} they are in DeepSpeed's hands, "
                f"out of reach: leave that out, or use strategy=ddp or fsdp"
            )
        return function(*args, **(kwargs or {}))


def _gathered_as_one(layer: nn.Module, units: set[nn.Module]) -> Iterator[nn.Module]:
    """The units, and the outermost layers beside them: ZeRO-3 gathers each whole when it runs, so that within one a
    rank may pass weights over. Of a layer that a rank does not run at all the other ranks' gathering would not end."""
    for child in layer.children():
        if child in units or not units.intersection(child.modules()):
            if any(True for _ in child.parameters()):
                yield child
        else:
            yield from _gathered_as_one(child, units)


def _touch(layer: nn.Module, parameters: list[nn.Parameter]) -> None:
    """Let all of `parameters` take part whenever `layer` runs, in one order: DeepSpeed reduces gradients in the order
    in which they come, and a rank on which one of them does not would add its neighbours to the wrong ones."""
    parameters = [p for p in parameters if p.requires_grad]
    if not parameters:
        return
    made: list[Tensor] = []

    def before(layer: nn.Module, args: Any) -> None:
        made[:] = [_Zero.apply(*parameters)] if torch.is_grad_enabled() else []  # type: ignore[no-untyped-call]

    def after(layer: nn.Module, args: Any, out: Any) -> Any:
        def add(leaf: Any) -> Any:
            if made and isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad:
                return leaf + made.pop().to(leaf.dtype)
            return leaf

        return tree_map(add, out)

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)


@contextmanager
def _reduced_one_by_one() -> Iterator[None]:
    """ZeRO-3 would reduce a leaf's gradients together, when that of its inputs is there: too early if these need none.
    Engines that are made inside reduce each gradient when it is there, as those of other layers."""
    from deepspeed.runtime.zero import stage3

    kept, stage3.z3_leaf_parameter = stage3.z3_leaf_parameter, lambda parameter: False
    try:
        yield
    finally:
        stage3.z3_leaf_parameter = kept


def engine_config(plan: Plan, training: bool) -> dict[str, Any]:
    """The Plan in DeepSpeed's words; a new dict each time, since DeepSpeed writes into it."""
    strategy, precision, cuda = plan.strategy, plan.precision, plan.accelerator == "cuda"
    zero: dict[str, Any] = {
        "stage": strategy.zero_stage,
        "reduce_bucket_size": _BUCKET,
        "allgather_bucket_size": _BUCKET,
        "overlap_comm": cuda,
        "contiguous_gradients": True,
        "round_robin_gradients": False,
    }
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
        # ZeRO-1 in bf16 becomes DeepSpeed's BF16_Optimizer by this: what accumulates is fp32 there too
        "data_types": {"grad_accum_dtype": "bf16" if precision.parameter_dtype == "bfloat16" else "fp32"},
        "steps_per_print": None,
    }
    if training or strategy.zero_stage == 3:
        config["zero_optimization"] = zero
    if precision.compute_dtype == "bfloat16":
        true = not precision.is_mixed
        config["bf16"] = {
            "enabled": True,
            "check_grad_overflow": False,  # ZeroStrategy._watch_gradients sees to it
            "immediate_grad_update": True,  # into the fp32 sum, so that 16-bit gradients do not wait for each other
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
