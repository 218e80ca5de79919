"""Makes the initial weights, which depend on seed and model alone, not on the strategy or the number of ranks.

A module that can initialise a layer (`init_module_weights(layer)`) is built without memory for its parameters. Then
each layer is made on the device and initialised under its own seed, one unit at a time, so that no rank ever holds the
whole model before it is sharded. Any other module is built on every rank and takes the parameters and buffers of rank
0, so that what its constructor did is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn

from shardwise import accelerator
from shardwise.checkpoint.state import ShardedState
from shardwise.distributed.collectives import broadcast_from_rank_zero, gather_objects
from shardwise.distributed.parameters import keep_notes
from shardwise.distributed.rng import derived_seed
from shardwise.errors import ConfigError, class_name
from shardwise.plan import Plan
from shardwise.protocols import initializes_itself


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Give parameters that are registered inside no memory, only a shape. Buffers and metric states are real."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = keep_notes(nn.Parameter(param.to("meta"), requires_grad=param.requires_grad), param)
        register(self, name, param)

    with patch.object(nn.Module, "register_parameter", register_on_meta):
        yield


def replace_parameters(root: nn.Module, by: dict[int, nn.Parameter]) -> None:
    """Put `by[id(parameter)]` in place of each parameter, wherever it stands: tied parameters stay one."""
    for layer in root.modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                layer._parameters[name] = by[id(parameter)]


def refuse_unfilled(
    module: LightningModule, plan: Plan, state: ShardedState, group: Callable[[], dist.ProcessGroup | None]
) -> None:
    """Refuse to train weights that neither the module nor a file has given values. Collective.

    `group`: gives that of all ranks.

    Raises:
        ConfigError: some hold what `Materializer` has left there.
    """
    if not initializes_itself(module) or plan.resume is not None:
        return
    here = []
    for shard in state.parameter_shards():
        if bool(shard.values.isnan().any()):
            owner = module.get_submodule(shard.name.rpartition(".")[0])
            here.append(f"{shard.name} ({class_name(owner)})")
    unfilled = list(dict.fromkeys(name for names in gather_objects(group(), here) for name in names))
    if unfilled:
        more = f" and {len(unfilled) - 4} more" if len(unfilled) > 4 else ""
        raise ConfigError(
            f"{class_name(module)}.init_module_weights(layer) leaves weights without values: "
            f"{', '.join(unfilled[:4])}{more}; a module that defines it is built without memory, so it has to fill "
            f"every parameter that a layer itself owns, e.g. by layer.reset_parameters() or torch.nn.init"
        )


class Materializer:
    """Gives the parts of one module their memory and their initial values, in any order, each part once.

    `group`: ranks that get rank 0's values where the module does not initialise itself; None: there is one rank.
    """

    def __init__(
        self, root: nn.Module, device: torch.device, seed: int, group: dist.ProcessGroup | None = None
    ) -> None:
        self.root, self.device, self.seed, self.group = root, device, seed, group
        self.names = {id(module): name for name, module in root.named_modules(remove_duplicate=True)}
        # By id, so that tied parameters stay one object. A strategy that shards a parameter drops the whole one, and
        # what is kept here must not keep it in memory.
        self.made: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()
        self.done: set[int] = set()  # ids of layers
        self.initializes_itself = initializes_itself(root)

    def materialize(self, part: nn.Module) -> None:
        """Put `part` on the device with its initial values. Layers that are done already are left alone."""
        layers = [m for m in part.modules() if id(m) not in self.done]
        self.done.update(id(m) for m in layers)
        for layer in layers:
            for name, parameter in layer._parameters.items():
                if parameter is not None:
                    layer._parameters[name] = self._on_device(parameter)
            for name, buffer in layer._buffers.items():
                if buffer is not None:
                    layer._buffers[name] = buffer.to(self.device)
        if not self.initializes_itself:
            if self.group is not None:
                parameters = [p.data for m in layers for p in m._parameters.values() if p is not None]
                broadcast_from_rank_zero(parameters, self.group)
            return
        for layer in layers:
            if any(p is not None for p in layer._parameters.values()):
                with accelerator.random_state_kept(self.device), torch.no_grad():
                    torch.manual_seed(derived_seed(self.seed, self.names[id(layer)]))
                    self.root.init_module_weights(layer)  # type: ignore[operator]

    def _on_device(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.device.type != "meta":  # optimizers and lists may have this object, as in any torch module
            parameter.data = parameter.data.to(self.device)
            return parameter
        made = self.made.get(id(parameter))
        if made is None:
            data = torch.empty_like(parameter, device=self.device)
            if data.is_floating_point() or data.is_complex():
                data.fill_(torch.nan)  # so that what nobody fills is found: see `refuse_unfilled`
            made = keep_notes(nn.Parameter(data, requires_grad=parameter.requires_grad), parameter)
            self.made[id(parameter)] = made
            self.made[id(made)] = made
        return made
