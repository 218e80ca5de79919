"""Runs a step of the module inside the forward of the root module, which a strategy wraps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from shardwise.parallel.compile import compiled
from shardwise.parallel.precision import ParameterSites, cast_parameters, dtype_of, map_tensors
from shardwise.plan import Plan
from shardwise.step.precision_plugin import PlannedPrecision


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
