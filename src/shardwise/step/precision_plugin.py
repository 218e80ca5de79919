"""Lightning's precision plugin: scales, unscales, measures the norm, clips and steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from shardwise import accelerator
from shardwise.distributed.dtensor import local_part, shard_groups
from shardwise.distributed.mesh import Mesh, largest_over, sum_over
from shardwise.errors import ConfigError, class_name
from shardwise.optim.optimizers import after_step, clip_by_norm, step_without_closure
from shardwise.parallel.precision import cast_floating, dtype_of
from shardwise.plan import Plan
from shardwise.step.verdict import StepVerdict

# The defaults of torch.amp. DeepSpeed has other defaults, and is given these.
LOSS_SCALE: dict[str, Any] = {"init_scale": 2.0**16, "growth_factor": 2.0,
                              "backoff_factor": 0.5, "growth_interval": 2000}  # fmt: skip

CLIPS = ("configure_gradient_clipping", "clip_gradients")  # hooks that may look at gradients around the clipping


class _Scaler(torch.amp.GradScaler):
    """A GradScaler that unscales this rank's parts of the gradients and shares the overflow flag with all ranks."""

    def __init__(self, device_type: str, mesh: Mesh) -> None:
        super().__init__(device_type, **LOSS_SCALE)
        self._mesh = mesh

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        if gradients:
            torch._amp_foreach_non_finite_check_and_unscale_(list(map(local_part, gradients)), found_inf, inv_scale)
        if self._mesh.plan.capabilities.shards:  # otherwise all ranks have the same gradients
            largest_over(self._mesh.group("world"), found_inf)
        return {found_inf.device: found_inf}


LIGHTNING_PRECISION: dict[str, Any] = {
    "fp64": "64-true",
    "fp32": "32-true",
    "tf32": "32-true",
    "bf16": "bf16-mixed",
    "bf16_true": "bf16-true",
    "fp16": "16-mixed",
    "fp8": "bf16-mixed",  # what a module looks at it for: the dtype outside of matrix products
}


class PlannedPrecision(LightningPrecision):
    """Applies the Plan's precision inside Lightning's loop, and owns the gradient norm and the loss scale."""

    def __init__(self, plan: Plan, verdict: StepVerdict | None = None) -> None:
        super().__init__()
        self.plan = plan
        self.verdict = verdict or StepVerdict(plan, Mesh(plan))
        self.precision = LIGHTNING_PRECISION[plan.precision.name]  # only for users who read `trainer.precision`
        self.gradient_norm: Tensor | None = None  # a scalar: the norm in the last step, before clipping
        self.gradients: list[tuple[nn.Parameter, Tensor]] = []  # parameters and their gradients' norms
        self._checkpoint_copied: accelerator.Event | None = None  # recorded when the copies are made
        self._norm_is_known = False  # whether `gradient_norm` is that of the gradients as they are now
        self._unscaled: dict[int, Tensor] = {}  # an optimizer's id → whether its unscaled gradients overflowed
        self._overflows: list[Tensor] = []  # whether each step of this batch overflowed
        self._steps_by_hand = False
        self._shard_groups: dict[int, tuple[dist.ProcessGroup, ...]] = {}  # a parameter's id → its groups
        self.stage_norm = StageNorm()
        self.scaler: torch.amp.GradScaler | None = None
        if plan.precision.loss_scaling and not plan.capabilities.owns_step:  # which has its own scaler
            self.scaler = _Scaler(plan.accelerator, self.verdict.mesh)

    @property
    def loss_scale(self) -> float | None:
        """The factor of the loss before the backward pass; None without loss scaling."""
        return None if self.scaler is None else self.scaler.get_scale()

    def forward_context(self) -> AbstractContextManager[Any]:
        precision = self.plan.precision
        if not precision.is_low:
            return nullcontext()
        # A cache is useless: every forward makes new copies of the parameters in the compute dtype.
        return torch.autocast(self.plan.accelerator, dtype_of(precision.compute_dtype), cache_enabled=False)

    def convert_input(self, data: Any) -> Any:
        if self.plan.precision.parameter_dtype == "float64":
            return cast_floating(data, torch.float64)
        return data

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        return super().pre_backward(tensor, module)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if not model.automatic_optimization:
            return self._step_by_hand(optimizer, model, closure, **kwargs)
        result = closure()
        self.wait_for_checkpoint_copy()
        if self.scaler is None:
            self._after_closure(model, optimizer)
            assert self.gradient_norm is not None
            self.verdict.judge(self.gradient_norm, optimizer)
        else:  # does what GradScaler.step does, and keeps the verdict for the counter, the schedule and the log
            self.scaler.unscale_(optimizer)
            found = self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
            self.verdict.decide(skipped=any(bool(flag.item()) for flag in found))
            self._after_closure(model, optimizer)
        if self.verdict.step_skipped is True:
            optimizer._opt_called = True  # type: ignore[attr-defined] # else the schedule would warn at the first step
        else:
            step_without_closure(optimizer, class_name(model), **kwargs)
        after_step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        return result

    def main_params(self, optimizer: Optimizer) -> Iterator[nn.Parameter]:
        """The parameters that have the gradients, even if the optimizer steps on other tensors."""
        return iter(parameters_of(optimizer))

    def loss_scale_state(self) -> dict[str, float]:
        """The state of the loss scaler for a checkpoint; empty without loss scaling."""
        if self.scaler is None:
            return {}
        state = self.scaler.state_dict()
        return {"scale": float(state["scale"]), "good_steps": int(state["_growth_tracker"])}

    def load_loss_scale(self, saved: dict[str, float]) -> None:
        if self.scaler is not None and saved:
            state = self.scaler.state_dict()
            self.scaler.load_state_dict(state | {"scale": saved["scale"], "_growth_tracker": int(saved["good_steps"])})

    # A module that steps its optimizers itself

    def _step_by_hand(
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        self._unscale(optimizer)
        self._after_closure(model, optimizer)
        overflowed = self._unscaled.pop(id(optimizer))
        self._overflows.append(overflowed)
        if not overflowed.item():
            self._steps_by_hand = True
            optimizer.step(**kwargs)
            self._steps_by_hand = False
        return result

    def _unscale(self, optimizer: Any) -> None:
        """Divide the gradients by the loss scale, once before each step: clipping needs their true values."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning wraps the module's optimizer
        if self.scaler is None or id(optimizer) in self._unscaled:
            return
        if self.scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED:  # `optimizer_step` did it
            return
        self.scaler.unscale_(optimizer)
        found = self.scaler._per_optimizer_states.pop(id(optimizer))["found_inf_per_device"]
        self._unscaled[id(optimizer)] = next(iter(found.values()))

    def end_batch_by_hand(self) -> int:
        """Choose the loss scale for the next batch, when no gradient of this batch waits for a step any more.

        Returns:
            How many steps were skipped.
        """
        overflows, self._overflows = self._overflows, []
        if self.scaler is None or not overflows:
            return 0
        worst = torch.stack(overflows).amax()
        self.scaler._per_optimizer_states[0]["found_inf_per_device"] = {worst.device: worst}
        self.scaler.update()
        return sum(int(overflow.item()) for overflow in overflows)

    def watch_step_by_hand(self, *_: Any) -> None:
        """Called before each step: refuse gradients that still have the loss scale in them, and wait until a checkpoint
        that is being written has its copies.

        Raises:
            ConfigError: the gradients are scaled.
        """
        if self.scaler is not None and not self._steps_by_hand:
            raise ConfigError(
                "precision=fp16 scales the gradients, and only the optimizers that self.optimizers() gives take the "
                "scale out before they step: leave use_pl_optimizer=False out, or use precision=bf16"
            )
        self.wait_for_checkpoint_copy()

    def begin_checkpoint_copy(self, copied: accelerator.Event | None) -> None:
        """Note that a checkpoint is being written. `copied` is recorded when weights and state have been copied."""
        self._checkpoint_copied = copied

    def wait_for_checkpoint_copy(self) -> None:
        """Let the device wait until a checkpoint that is being written has its copies of weights and state."""
        if self._checkpoint_copied is not None:
            self._checkpoint_copied.wait()
            self._checkpoint_copied = None

    @torch.no_grad()  # otherwise autograd would record how a DTensor's part is taken
    def _clip_gradients(self, model: LightningModule | nn.Module, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        assert isinstance(model, LightningModule)
        if not model.automatic_optimization:
            return
        self._measure_gradients(optimizer)
        self._norm_is_known = not any(is_overridden(hook, model) for hook in CLIPS)
        super()._clip_gradients(model, optimizer, *args, **kwargs)
        self._norm_is_known = False

    def _measure_gradients(self, optimizer: Optimizer) -> None:
        """Set `gradients` and `gradient_norm`. Collective."""
        parameters = [p for p in self.main_params(optimizer) if p.grad is not None]
        # Local parts are used, since DTensors' arithmetic takes the host longer than the device.
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
        # A norm in bfloat16 has only 8 bits: gradients would be clipped by a rounded number.
        dtype = torch.float32 if self.plan.precision.parameter_dtype == "bfloat16" else None
        norms = list(torch._foreach_norm(gradients, dtype=dtype)) if gradients else []
        self.gradients = list(zip(parameters, norms, strict=True))
        self.gradient_norm = self.stage_norm.whole(parameters, norms, self._whole_norm)

    def divide(self, parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
        """Note that `parameter` is a part of one that the ranks of `group` divide, beside its shards."""
        self._shard_groups[id(parameter)] = (*shard_groups(parameter), group)

    def _whole_norm(self, parameters: list[nn.Parameter], norms: list[Tensor]) -> Tensor:
        """The norm of all gradients, over every mesh axis that they are sharded on. Collective."""
        if not norms:  # no weight took part in this step
            return torch.zeros((), device=self.plan.accelerator)
        by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
        for parameter, norm in zip(parameters, norms, strict=True):
            groups = self._shard_groups.get(id(parameter))
            if groups is None:
                groups = self._shard_groups[id(parameter)] = shard_groups(parameter)
            by_groups.setdefault(groups, []).append(norm)
        wholes = []
        for groups, local_norms in by_groups.items():
            whole = torch.linalg.vector_norm(torch.stack(local_norms))
            if groups:
                square = whole.square_()
                for group in groups:
                    sum_over(group, square)
                whole = square.sqrt_()
            wholes.append(whole)
        whole = wholes[0] if len(wholes) == 1 else torch.linalg.vector_norm(torch.stack(wholes))
        return cast(Tensor, whole)

    @torch.no_grad()
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scale this rank's parts as `torch.nn.utils.clip_grad_norm_` does, by the norm over all ranks. Collective."""
        self._unscale(optimizer)
        norm, gradients = self.gradient_norm, self.gradients
        if not self._norm_is_known:  # the module clips by itself; the log keeps the norm measured before
            self._measure_gradients(optimizer)
            measured, self.gradient_norm, self.gradients = self.gradient_norm, norm, gradients
            norm = measured
        assert norm is not None
        clip_by_norm(self._local_gradients(optimizer), norm, clip_val, optimizer if self._norm_is_known else None)

    @torch.no_grad()
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clamp this rank's parts, as `torch.nn.utils.clip_grad_value_` does."""
        self._unscale(optimizer)
        if local := self._local_gradients(optimizer):
            torch._foreach_clamp_min_(local, -clip_val)
            torch._foreach_clamp_max_(local, clip_val)

    def _local_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        return [local_part(p.grad) for p in self.main_params(optimizer) if p.grad is not None]


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters that have the gradients, even if the optimizer steps on other tensors."""
    sharded = getattr(optimizer, "sharded_parameters", None)
    return sharded or [p for group in optimizer.param_groups for p in group["params"]]


# The norm of all gradients, where ranks have different layers.


class StageNorm:
    """Adds up the norms of the stages of a pipeline; without one, the norm of the only stage is that of all."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None

    def measure_over(
        self, group: dist.ProcessGroup, counted_elsewhere: Collection[int], device: torch.device, dtype: torch.dtype
    ) -> None:
        """Measure over `group`, one rank of each stage, in `dtype`.

        `counted_elsewhere`: the ids of parameters of which another stage has a copy, and counts it.
        """
        self._group, self._counted_elsewhere = group, counted_elsewhere
        self._device, self._dtype = device, dtype

    def whole(
        self,
        parameters: list[nn.Parameter],
        norms: list[Tensor],
        of_stage: Callable[[list[nn.Parameter], list[Tensor]], Tensor],
    ) -> Tensor:
        """The norm over all stages. `of_stage`: gives that of this stage. Collective."""
        if self._group is None:
            return of_stage(parameters, norms)
        own = [(p, norm) for p, norm in zip(parameters, norms, strict=True) if id(p) not in self._counted_elsewhere]
        if own:
            square = of_stage([p for p, _ in own], [norm for _, norm in own]) ** 2
        else:  # all weights of this stage are frozen
            square = torch.zeros((), device=self._device)
        return sum_over(self._group, square.to(self._dtype)).sqrt()
