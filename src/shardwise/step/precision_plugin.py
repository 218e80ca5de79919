"""Lightning's precision plugin: scales, unscales, measures the norm, clips and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.distributed.collectives import largest_over, sum_over
from shardwise.distributed.dtensor import local_part, shard_groups
from shardwise.distributed.mesh import Mesh
from shardwise.errors import ConfigError
from shardwise.parallel.precision import cast_floating, dtype_of
from shardwise.plan import Plan
from shardwise.step.verdict import StepVerdict

# torch.amp's defaults, said once: DeepSpeed's are others
LOSS_SCALE: dict[str, Any] = {
    "init_scale": 2.0**16,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
}


class _Scaler(torch.amp.GradScaler):
    """Looks at what this rank holds of every gradient, and asks the ranks that hold the rest."""

    def __init__(self, device_type: str, mesh: Mesh) -> None:
        super().__init__(device_type, **LOSS_SCALE)
        self._mesh = mesh

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        if gradients:
            torch._amp_foreach_non_finite_check_and_unscale_(list(map(local_part, gradients)), found_inf, inv_scale)
        if any(isinstance(gradient, DTensor) for gradient in gradients):
            largest_over(self._mesh.group("loss"), found_inf)
        return {found_inf.device: found_inf}


LIGHTNINGS_WORDS: dict[str, Any] = {
    "fp64": "64-true",
    "fp32": "32-true",
    "tf32": "32-true",
    "bf16": "bf16-mixed",
    "bf16_true": "bf16-true",
    "fp16": "16-mixed",
}


class PlannedPrecision(LightningPrecision):
    """The Plan's precision inside Lightning's loop, and the owner of gradient norm and loss scale."""

    def __init__(self, plan: Plan, verdict: StepVerdict | None = None) -> None:
        super().__init__()
        self.plan = plan
        self.verdict = verdict or StepVerdict(plan, Mesh(plan))
        self.precision = LIGHTNINGS_WORDS[plan.precision.name]  # `trainer.precision`; nothing here acts on it
        self.gradient_norm: Tensor | None = None  # of the last step, before clipping; a scalar on the device
        self.gradients: list[tuple[nn.Parameter, Tensor]] = []  # of the last step, each with its gradient's norm
        self._checkpoint_copied: torch.cuda.Event | None = None  # when it has what the next step would change
        self._norm_is_known = False  # the gradients are still those that `gradient_norm` is of
        self._unscaled: dict[int, Tensor] = {}  # by an optimizer's id: whether what the scale was taken from overflowed
        self._overflows: list[Tensor] = []  # of this batch's steps
        self._steps_by_hand = False
        self._shard_groups: dict[int, tuple[dist.ProcessGroup, ...]] = {}  # by a parameter's id
        self.scaler: torch.amp.GradScaler | None = None
        if plan.precision.loss_scaling and not plan.strategy.zero_stage:  # DeepSpeed has its own
            self.scaler = _Scaler(plan.accelerator, self.verdict.mesh)

    @property
    def loss_scale(self) -> float | None:
        """What the loss is multiplied by before backward; None where there is no scaling."""
        return None if self.scaler is None else self.scaler.get_scale()

    def forward_context(self) -> AbstractContextManager[Any]:
        precision = self.plan.precision
        if not precision.is_low:
            return nullcontext()
        # No cache: the parameters are copies in the compute dtype already, made anew in every forward.
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
        else:  # as GradScaler.step, but the verdict is known here: counter, schedule and log follow it
            self.scaler.unscale_(optimizer)
            found = self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
            self.verdict.decide(skipped=any(bool(flag.item()) for flag in found))
            self._after_closure(model, optimizer)
        if self.verdict.step_skipped is True:
            optimizer._opt_called = True  # type: ignore[attr-defined] # else the schedule would warn, at the first step
        else:
            optimizer.step(**kwargs)
        if self.scaler is not None:
            self.scaler.update()
        return result

    def main_params(self, optimizer: Optimizer) -> Iterator[nn.Parameter]:
        """Those that have the gradients, whatever the optimizer steps on."""
        return iter(parameters_of(optimizer))

    def loss_scale_state(self) -> dict[str, float]:
        """What a checkpoint keeps of the loss scale; empty where there is no scaling."""
        if self.scaler is None:
            return {}
        state = self.scaler.state_dict()
        return {"scale": float(state["scale"]), "good_steps": int(state["_growth_tracker"])}

    def load_loss_scale(self, saved: dict[str, float]) -> None:
        if self.scaler is not None and saved:
            state = self.scaler.state_dict()
            self.scaler.load_state_dict(state | {"scale": saved["scale"], "_growth_tracker": int(saved["good_steps"])})

    # Where a module steps its optimizers itself

    def _step_by_hand(
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.scaler is None:
            self.wait_for_checkpoint_copy()
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        self.wait_for_checkpoint_copy()
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
        """Take the loss scale out of the gradients, once before each step: who clips needs them as they are."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning's has the module's inside
        if self.scaler is None or id(optimizer) in self._unscaled:
            return
        if self.scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED:  # by `optimizer_step`
            return
        self.scaler.unscale_(optimizer)
        found = self.scaler._per_optimizer_states.pop(id(optimizer))["found_inf_per_device"]
        self._unscaled[id(optimizer)] = next(iter(found.values()))

    def end_batch_by_hand(self) -> int:
        """Choose the loss scale for the next batch: not before, since gradients of this one may wait for a step.

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
        """Before an optimizer steps.

        Raises:
            ConfigError: its gradients have the loss scale in them.
        """
        if self.scaler is not None and not self._steps_by_hand:
            raise ConfigError(
                "precision=fp16 scales the gradients, and only the optimizers that self.optimizers() gives take the "
                "scale out before they step: leave use_pl_optimizer=False out, or use precision=bf16"
            )

    def begin_checkpoint_copy(self, copied: torch.cuda.Event | None) -> None:
        """A checkpoint is being written; `copied` is recorded when it has its copies of weights and state."""
        self._checkpoint_copied = copied

    def wait_for_checkpoint_copy(self) -> None:
        """The device goes on when a checkpoint that is being written has its copies of weights and state."""
        if self._checkpoint_copied is not None:
            torch.cuda.current_stream().wait_event(self._checkpoint_copied)
            self._checkpoint_copied = None

    def _after_closure(self, model: LightningModule, optimizer: Any) -> None:
        """One rule for a weight that took no part in a step: its gradient is zero. Left at None, who steps it and who
        does not would depend on the strategy: momentum and weight decay would go on under some."""
        if model.automatic_optimization:
            for parameter in self.main_params(optimizer):
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        super()._after_closure(model, optimizer)

    @torch.no_grad()  # with it, a DTensor's part comes through autograd
    def _clip_gradients(self, model: LightningModule | nn.Module, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        assert isinstance(model, LightningModule)
        if not model.automatic_optimization:
            return
        self._measure_gradients(optimizer)
        self._norm_is_known = not is_overridden("configure_gradient_clipping", model)
        super()._clip_gradients(model, optimizer, *args, **kwargs)
        self._norm_is_known = False

    def _measure_gradients(self, optimizer: Optimizer) -> None:
        """Collective."""
        parameters = [p for p in self.main_params(optimizer) if p.grad is not None]
        # On what this rank holds: the arithmetic of DTensors takes the host longer than the device needs for it.
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
        # A norm in bfloat16 has 8 bits, and gradients would be clipped by a rounded number.
        dtype = torch.float32 if self.plan.precision.parameter_dtype == "bfloat16" else None
        norms = list(torch._foreach_norm(gradients, dtype=dtype)) if gradients else []
        self.gradients = list(zip(parameters, norms, strict=True))
        self.gradient_norm = self._whole_norm(parameters, norms) if norms else torch.zeros(())

    def _whole_norm(self, parameters: list[nn.Parameter], norms: list[Tensor]) -> Tensor:
        """Of all gradients, over every axis that they are sharded on. Collective."""
        by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
        for parameter, norm in zip(parameters, norms, strict=True):
            groups = self._shard_groups.get(id(parameter))
            if groups is None:
                groups = self._shard_groups[id(parameter)] = shard_groups(parameter)
            by_groups.setdefault(groups, []).append(norm)
        wholes = []
        for groups, held in by_groups.items():
            whole = torch.linalg.vector_norm(torch.stack(held))
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
        """As `torch.nn.utils.clip_grad_norm_`, on what this rank holds, by the norm over all ranks. Collective."""
        self._unscale(optimizer)
        norm, gradients = self.gradient_norm, self.gradients
        if not self._norm_is_known:  # the module clips, at a time of its own: what is logged stays the norm before
            self._measure_gradients(optimizer)
            own, self.gradient_norm, self.gradients = self.gradient_norm, norm, gradients
            norm = own
        assert norm is not None
        if held := self._held_gradients(optimizer):
            torch._foreach_mul_(held, (clip_val / (norm + 1e-6)).clamp(max=1.0))

    @torch.no_grad()
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """As `torch.nn.utils.clip_grad_value_`, on what this rank holds."""
        self._unscale(optimizer)
        if held := self._held_gradients(optimizer):
            torch._foreach_clamp_min_(held, -clip_val)
            torch._foreach_clamp_max_(held, clip_val)

    def _held_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        return [local_part(p.grad) for p in self.main_params(optimizer) if p.grad is not None]


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Those that have the gradients, whatever the optimizer steps on."""
    sharded = getattr(optimizer, "sharded_parameters", None)
    return sharded or [p for group in optimizer.param_groups for p in group["params"]]
