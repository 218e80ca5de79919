"""An accumulation window turns the micro-batches of one step into the gradient of the mean over the global batch.

The loader knows the weight of a whole window before its first micro-batch is computed (see data/loaders.py). So each
loss can be scaled before its backward pass. Later would be too late, since DeepSpeed clips inside its step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from shardwise.distributed.dtensor import local_part
from shardwise.errors import ConfigError
from shardwise.parallel.parallelize import compiled
from shardwise.parallel.precision import ParameterSites, cast_parameters, dtype_of, map_tensors
from shardwise.plan import Plan
from shardwise.step.precision_plugin import PlannedPrecision


class AccumulationWindow:
    """The losses of the current step's micro-batches on this rank."""

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self.losses: list[
            Tensor
        ] = []  # what each micro-batch adds to the loss of the window: shares, not the losses of training_step
        self._factor: Tensor | None = None  # the factor for the current micro-batch's loss

    def begin(self) -> None:
        self.losses = []

    def begin_micro_batch(self, scale: Tensor | None) -> None:
        """Begin the next micro-batch. `scale`: the factor of its loss; None: the loss is used as it is."""
        self._factor = scale

    @property
    def factor(self) -> Tensor | None:
        """The factor of the current micro-batch's loss: in proportion to what the micro-batch counts on this rank."""
        return self._factor

    @property
    def is_complete(self) -> bool:
        """Whether every micro-batch has had its forward pass."""
        return len(self.losses) == self.micro_batches

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to differentiate: this micro-batch's share of the loss of the global batch.

        `loss`: of `training_step`, divided by the number of micro-batches already: Lightning does that.
        """
        scaled = share_of_loss(loss, self._factor)
        self.losses.append(scaled.detach().reshape(()))
        return scaled

    def take_loss_of_manual_step(self, output: Any) -> None:
        """Take the loss for the log and the guard from what a module that optimizes by hand returns."""
        loss = loss_of(output)
        self.losses = []
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self.losses = [local_part(loss).detach().reshape(()).float()]

    @property
    def loss(self) -> Tensor:
        """The sum of the scaled losses of this rank's micro-batches."""
        return torch.stack(self.losses).sum() if len(self.losses) > 1 else self.losses[0]


def share_of_loss(loss: Tensor, factor: Tensor | None) -> Tensor:
    """The loss times its factor. What counts nothing is 0, whatever it is: a mean over no targets is NaN."""
    if factor is None:
        return loss
    factor = factor.to(loss.dtype)
    return torch.where(factor > 0, loss * factor, 0.0)


def loss_of(output: Any) -> Any:
    """The loss in what `training_step` returns."""
    return output.get("loss") if isinstance(output, dict) else output


def check_output(output: Any, module_name: str, *, has_own_backward: bool) -> None:
    """Check what `training_step` of a module with automatic optimization has returned.

    Raises:
        ConfigError: no loss, or one that does not depend on the weights.
    """
    if output is None:
        raise ConfigError(
            f"{module_name}.training_step returned None: every micro-batch needs a loss, "
            f"since the others of its step are weighed with it; return a loss of zero that depends on the weights"
        )
    loss = loss_of(output)
    if not has_own_backward and isinstance(loss, Tensor) and not loss.requires_grad:
        raise ConfigError(
            f"{module_name}.training_step returned a loss that has no gradient: it does not depend on the "
            f"parameters that are trained; look for detach(), torch.no_grad() or a new tensor made of its value, "
            f"or for parameters that are all frozen"
        )


# Runs a step of the module inside the forward of the root module, which a strategy wraps.


class StepForward:
    """Calls `training_step` and the module's other steps through the forward of the root, if the strategy needs that.

    `outside_units`: the layers that hold the parameters of which each step makes low-precision copies.
    `redirect(root, module, name, *args, **kwargs)`: calls the root's forward, and within it the module's method `name`.
    """

    def __init__(
        self,
        module: LightningModule,
        plan: Plan,
        precision: PlannedPrecision,
        outside_units: list[ParameterSites],
        redirect: Callable[..., Any],
    ) -> None:
        self.module, self.plan, self.precision = module, plan, precision
        self.outside_units, self.redirect = outside_units, redirect
        self._training_step: Callable[..., Any] | None = None  # the compiled one, with compile=model

    def run(self, root: nn.Module | None, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run the step `name`. `root`: the module as the strategy has wrapped it; None: call the step directly."""
        if self.plan.compile.cudagraphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        method = self._method(name)
        if name == "training_step" and self.plan.compile.name == "model":
            self._training_step = method = self._training_step or self._compiled(method)

        def inside(*args: Any, **kwargs: Any) -> Any:
            with self.precision.forward_context():  # here, since DeepSpeed's engine switches autocast off
                return method(*args, **kwargs)

        if root is None:
            return inside(*args, **kwargs)
        self.module.__dict__["_planned_step"] = inside
        return self.redirect(root, self.module, "_planned_step", *args, **kwargs)

    @property
    def _compute_dtype(self) -> torch.dtype:
        return dtype_of(self.plan.precision.compute_dtype)

    def _compiled(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        step = compiled(training_step, self.plan.compile)
        if not self.plan.compile.cudagraphs:
            return step
        # The next replay writes over what a recorded graph has returned, and the loss is read later than that.
        return lambda *args, **kwargs: map_tensors(torch.clone, step(*args, **kwargs))

    def _method(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self.module, name)
        if not self.outside_units:
            return method
        dtype = self._compute_dtype

        def run(*args: Any, **kwargs: Any) -> Any:
            with cast_parameters(self.outside_units, dtype):
                return method(*args, **kwargs)

        return run

    @contextmanager
    def as_in_steps(self) -> Iterator[None]:
        """Inside, layers that run outside of a step compute as they do within one."""
        with self.precision.forward_context(), cast_parameters(self.outside_units, self._compute_dtype):
            yield
