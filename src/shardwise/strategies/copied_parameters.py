"""Which parameters shardwise copies in low precision, and which are cast to fp8 instead, also in hooks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import nn

from shardwise.parallel.parallelize import prepare_float8
from shardwise.parallel.precision import dtype_of
from shardwise.parallel.tensor_parallel import TensorParallel
from shardwise.plan import Plan
from shardwise.step.forward import StepForward
from shardwise.step.layers_in_hooks import LayersInHooks
from shardwise.step.window import AccumulationWindow

if TYPE_CHECKING:  # needs torchao
    from shardwise.parallel.float8 import Float8Layers


class CopiedParameters(Strategy):
    """The answers that depend on whether a strategy shards parameters, and on `precision=fp8`."""

    plan: Plan
    window: AccumulationWindow
    step_forward: StepForward
    # Outside a forward weights are sharded, or a hook's writes into them may be lost.
    hides_weights = False
    layers_in_hooks: LayersInHooks | None
    float8: Float8Layers | None = None  # the layers that multiply in fp8

    def _keeps_whole(self, parameter: nn.Parameter) -> bool:
        """Whether every rank keeps the whole `parameter`."""
        return False

    def _is_copied(self, parameter: nn.Parameter) -> bool:
        """Whether shardwise makes low-precision copies of `parameter`."""
        return self._keeps_whole(parameter) and not (self.float8 and self.float8.cast_from_master(parameter))

    def _prepare_float8(self, module: LightningModule, divided: TensorParallel | None = None) -> None:
        """Let layers multiply in fp8 if the Plan says so, and tell the user which."""
        self.float8 = prepare_float8(module, self.plan, divided)
        if self.float8 is not None and self.is_global_zero:
            slow = self.plan.compile.name == "none" and self.plan.accelerator == "cuda"
            print(f"{self.float8}{'; slow without compile=layer or model' if slow else ''}", flush=True)

    def _prepare_hooks(self, module: LightningModule) -> None:
        """Let layers that hooks run compute as in a step."""
        if self.plan.precision.is_low:
            dtype = dtype_of(self.plan.precision.parameter_dtype)
            self.layers_in_hooks = LayersInHooks(module, self._as_in_steps, dtype)

    def _as_in_steps(self) -> AbstractContextManager[None]:
        if self.hides_weights:  # then every rank runs the layers that one of them runs
            self._refresh_float8()
        return self.step_forward.as_in_steps()

    def _weights_may_be_new(self, name: str) -> bool:
        """Whether the step `name` may see weights that the one before has not seen."""
        return name != "training_step" or not self.window.losses  # a step's further micro-batches see the same weights

    def _refresh_float8(self) -> None:
        """Compute the scales of weights that are gathered in fp8. Collective."""
        if self.float8 is not None:
            self.float8.refresh_scales()
