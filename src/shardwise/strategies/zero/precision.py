"""The precision plugin for DeepSpeed, whose engine scales, reduces, clips and steps."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.step.precision_plugin import PlannedPrecision
from shardwise.step.verdict import StepVerdict
from shardwise.strategies.zero.internals import finish_writes
from shardwise.strategies.zero.optimizer import StepHooks


class ZeroPrecision(PlannedPrecision):
    """Lets DeepSpeed's engine scale, reduce, clip and step, and reads from it whether the step was skipped."""

    def __init__(self, plan: Plan, verdict: StepVerdict) -> None:
        super().__init__(plan, verdict)
        self.is_in_backward = False  # whether the step's own backward pass is running
        self._step_hooks: StepHooks | None = None
        self._engine: Any = None
        self._explain: Callable[[], Exception] = RuntimeError
        self._check_backward: Callable[[], None] | None = None

    def use(self, engine: Any, weights_are_sharded: Callable[[], Exception]) -> None:
        """Use `engine`. `weights_are_sharded`: makes the error for a step that needs a weight which is not there."""
        self._engine, self._explain = engine, weights_are_sharded

    def after_backward(self, check: Callable[[], None]) -> None:
        """Let `check` look at each backward pass of a step when it has ended."""
        self._check_backward = check

    def call_around_steps(self, hooks: StepHooks) -> None:
        self._step_hooks = hooks

    @property
    def loss_scale(self) -> float | None:
        return float(self._engine.optimizer.cur_scale) if self.plan.precision.loss_scaling else None

    def loss_scale_state(self) -> dict[str, float]:
        if not self.plan.precision.loss_scaling:
            return {}
        scaler = self._engine.optimizer.loss_scaler
        return {"scale": float(scaler.cur_scale), "good_steps": scaler.cur_iter - scaler.last_overflow_iter - 1}

    def load_loss_scale(self, saved: dict[str, float]) -> None:
        if self.plan.precision.loss_scaling and saved:
            scaler = self._engine.optimizer.loss_scaler
            scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = saved["scale"], int(saved["good_steps"]), -1

    def watch_gradients(self, optimizer: Any) -> None:
        """Keep the norms of gradients that DeepSpeed throws away because they are not finite.

        In bf16 also let DeepSpeed skip such a step by the norm of all gradients. Its own `check_grad_overflow` would
        read every gradient a second time.
        """
        name = "clear_hp_grads" if hasattr(optimizer, "clear_hp_grads") else "zero_grad"
        clear = getattr(optimizer, name)

        def note_and_clear(*args: Any, **kwargs: Any) -> Any:
            if optimizer.overflow and not self.gradients:
                self.gradients = list(gradient_norms(optimizer))
            return clear(*args, **kwargs)

        setattr(optimizer, name, note_and_clear)
        if self.plan.precision.loss_scaling:  # the guard ends a run whose scale was halved too often
            optimizer.loss_scaler.min_scale, optimizer.loss_scaler.raise_error_at_min_scale = 2.0**-24, False
        if self.plan.precision.compute_dtype == "bfloat16" and hasattr(optimizer, "check_grad_overflow"):
            global_norm = optimizer.scaled_global_norm

            def norm_before_check(*args: Any, **kwargs: Any) -> Any:
                optimizer.check_grad_overflow = True  # DeepSpeed reads it before the norm is computed, and again after
                return global_norm(*args, **kwargs)

            optimizer.scaled_global_norm = norm_before_check

    def backward(self, tensor: Tensor, model: LightningModule, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.is_in_backward = True
        try:
            self._engine.backward(tensor, *args[1:], scale_wrt_gas=False, **kwargs)  # the loss is divided already
            self.is_in_backward = False
        except RuntimeError as error:
            if "invalid gradient" in str(error) and "got [0]" in str(error):  # the weight is not gathered
                raise self._explain() from None
            raise
        if self._check_backward is not None:
            self._check_backward()

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        result = closure()
        self.wait_for_checkpoint_copy()
        self._after_closure(model, optimizer)
        before = self._engine.skipped_steps
        self.gradients = []
        if not self.plan.precision.loss_scaling:
            self._engine.optimizer.check_grad_overflow = False  # see `watch_gradients`
        assert self._step_hooks is not None
        with self._step_hooks.around(counts=lambda: bool(self._engine.skipped_steps == before)):
            self._engine.step()
            finish_writes(self._engine.optimizer)
        self.verdict.decide(skipped=self._engine.skipped_steps > before)
        norm = self._engine.get_global_grad_norm()
        self.gradient_norm = torch.as_tensor(float("inf") if norm is None else norm)
        return result

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        with GradientsOutOfReach("on_after_backward", self.plan.strategy.name):
            return super().post_backward(tensor, module)

    def _after_closure(self, model: LightningModule, optimizer: Any) -> None:
        with GradientsOutOfReach("on_before_optimizer_step", self.plan.strategy.name):
            super()._after_closure(model, optimizer)

    def _clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, since the engine's step clips."""


class GradientsOutOfReach(TorchFunctionMode):
    """Refuses that a hook reads a parameter's gradient: there is none, or only that of one micro-batch."""

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


def gradient_norms(optimizer: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The norms of the gradients that this rank holds in a DeepSpeed optimizer before its step, with the parameters."""
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
        for parameter, gradient in zip(parameters, gradients, strict=False):  # the last gradient may be padding
            yield parameter, torch.linalg.vector_norm(gradient.float())
