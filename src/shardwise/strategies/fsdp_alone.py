"""`fsdp` where a rank shares its parameters and their gradients with no other, as on a tensor or pipeline axis alone.

FSDP2 would copy the parameters of each unit twice a micro-batch and reduce their gradients with themselves, which takes
the host nearly as long as the layer. Here a pass computes with the parameters themselves: a layer has plain tensors
while it runs and in the backward pass, and in between DTensors of the same memory, as FSDP2 has them. Low-precision
copies are made in the compiled layer, as under `ddp`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwise.distributed.parameters import keep_attributes, keep_notes
from shardwise.parallel.units import Units
from shardwise.plan import Plan
from shardwise.step.precision_plugin import PlannedPrecision
from shardwise.strategies.base import PlannedStrategy

# Not yet: a gradient that a step computes in a backward pass of its own, or that reaches a shard itself, would be lost,
# and layers that such a pass computes again would not find their parameters. Tests switch it on.
USED = False


def is_alone(plan: Plan, automatic: bool) -> bool:
    """Whether a rank has the only copy of its parameters, and may compute with them. `automatic`: Lightning steps.

    Without compile=layer autograd would keep each low-precision copy until the backward pass.
    """
    keeps_copies = plan.precision.is_mixed and plan.compile.name != "layer"
    usual = plan.compile.name != "model" and not plan.strategy.defer_gradient_sync
    topology = plan.topology
    sharers = topology.replicate * topology.shard * topology.context
    return USED and sharers == 1 and automatic and usual and not keeps_copies


class _Parameter:
    """One parameter: `own` in a pass, and `shard` outside. `sites`: the `_parameters` it is in, with its keys there."""

    def __init__(self, own: nn.Parameter, mesh: DeviceMesh) -> None:
        part = DTensor.from_local(own.detach(), mesh, [Shard(0)], run_check=False)
        self.shard = keep_notes(nn.Parameter(part, own.requires_grad), own)
        self.own = nn.Parameter(own.detach(), own.requires_grad)
        keep_attributes(self.own, own)
        self.sites: list[tuple[dict[str, Any], str]] = []

    def show(self) -> None:
        if self.own.requires_grad != self.shard.requires_grad:  # frozen or not by a hook
            self.own.requires_grad_(self.shard.requires_grad)
        for parameters, key in self.sites:
            if parameters[key] is self.shard:  # a hook may see whole weights in its place
                parameters[key] = self.own

    def hide(self) -> None:
        for parameters, key in self.sites:
            if parameters[key] is self.own:
                parameters[key] = self.shard

    def take_gradient(self) -> None:
        """Go on adding to the gradient of earlier micro-batches."""
        gradient: Any = self.shard.grad
        self.own.grad = None if gradient is None else gradient._local_tensor

    def give_gradient(self) -> None:
        gradient, shard, found = cast(Any, self.shard.grad), cast(Any, self.shard), self.own.grad
        self.own.grad = None  # else its memory would outlive the step
        if found is None:
            return
        if gradient is None or gradient._local_tensor is not found:
            shard.grad = cast(Any, DTensor)(found, shard._spec, requires_grad=False)
        for hook in (shard._post_accumulate_grad_hooks or {}).values():  # FSDP2 calls them, too
            hook(shard)


class _Layer:
    """Parameters that are shown together, while one layer runs."""

    def __init__(self) -> None:
        self.parameters: list[_Parameter] = []
        self.depth = 0

    def enter(self, *_: Any) -> None:
        if not self.depth:
            for parameter in self.parameters:
                parameter.show()
        self.depth += 1

    def leave(self, *_: Any) -> None:
        self.depth -= 1
        if not self.depth:
            for parameter in self.parameters:
                parameter.hide()


class OwnParameters:
    """All parameters of `root` that have memory here, `but` for some. `units`: layers whose parameters are shown while
    they run. All others are shown while the root runs."""

    def __init__(self, root: nn.Module, units: Sequence[nn.Module], but: set[nn.Parameter], mesh: DeviceMesh) -> None:
        layers: dict[nn.Module, _Layer] = {module: _Layer() for module in (*units, root)}
        unit_of = {layer: unit for unit in units for layer in unit.modules()}
        found: dict[nn.Parameter, tuple[_Parameter, set[nn.Module]]] = {}
        for layer in root.modules():
            for key, own in layer._parameters.items():
                if own is None or own.is_meta or own in but:
                    continue
                if own not in found:
                    found[own] = _Parameter(own, mesh), set()
                parameter, users = found[own]
                parameter.sites.append((layer._parameters, key))
                users.add(unit_of.get(layer, root))
        for parameter, users in found.values():
            layers[users.pop() if len(users) == 1 else root].parameters.append(parameter)
        self.layers, self.root = list(layers.values()), layers[root]
        for parameter in self._all():
            for parameters, key in parameter.sites:
                parameters[key] = parameter.shard
        for module, together in layers.items():
            module.register_forward_pre_hook(together.enter)
            module.register_forward_hook(together.leave, always_call=True)

    def _all(self) -> Iterator[_Parameter]:
        return (parameter for layer in self.layers for parameter in layer.parameters)

    @contextmanager
    def shown_in_step(self) -> Iterator[None]:
        """Inside, the root runs."""
        depth = self.root.depth
        self.root.enter()
        try:
            yield
        finally:
            self.root.depth = depth + 1  # torch calls no hook of a call that a stage of a pipeline ends within it
            self.root.leave()

    @contextmanager
    def shown_in_backward(self) -> Iterator[None]:
        """Inside, gradients are computed, and layers may run once more. Afterwards the shards have the gradients."""
        for layer in self.layers:
            layer.enter()
        for parameter in self._all():
            parameter.take_gradient()
        try:
            yield
        finally:
            for parameter in self._all():
                parameter.give_gradient()
            for layer in self.layers:
                layer.leave()


class FsdpPrecision(PlannedPrecision):
    """Shows a rank's own parameters in backward passes, and in no hook before or behind them."""

    own: OwnParameters | None = None

    def show_in_backward(self, own: OwnParameters) -> None:
        self.own = own

    def backward(self, *args: Any, **kwargs: Any) -> None:
        with nullcontext() if self.own is None else self.own.shown_in_backward():
            super().backward(*args, **kwargs)


class AloneStrategy(PlannedStrategy):
    """What `fsdp` does by itself if this rank shares its parameters with no other."""

    is_alone = False
    own: OwnParameters | None = None

    def find_whether_alone(self, module: LightningModule) -> None:
        """Decide it when set-up begins."""
        self.is_alone = is_alone(self.plan, module.automatic_optimization)

    def compute_with_own(self, module: LightningModule, units: Units, but: set[nn.Parameter], mesh: DeviceMesh) -> None:
        """Begin with it when all layers have their memory. `but`: parameters that are not shards under FSDP2 either."""
        self.own = OwnParameters(module, [unit for _, unit in units.modules], but, mesh)
        assert isinstance(self.precision_plugin, FsdpPrecision)
        self.precision_plugin.show_in_backward(self.own)

    def _computes_with(self, parameter: nn.Parameter) -> bool:
        return self.is_alone or super()._computes_with(parameter)

    def _in_forward(self) -> AbstractContextManager[None]:
        return nullcontext() if self.own is None else self.own.shown_in_step()

    def _in_backward(self) -> AbstractContextManager[None]:
        """What is put around a backward pass that is not Lightning's."""
        return nullcontext() if self.own is None else self.own.shown_in_backward()

    def _run_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with self._in_forward():
            return super()._run_step(name, *args, **kwargs)

    @contextmanager
    def _as_in_steps(self) -> Iterator[None]:
        with self._in_forward(), super()._as_in_steps():
            yield
