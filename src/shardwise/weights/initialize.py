"""Makes the initial weights, which depend on seed and model alone, and freezes parts of a module."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn

from shardwise import accelerator
from shardwise.checkpoint.state import COMPILED, ShardedState
from shardwise.distributed.mesh import broadcast_from_rank_zero, gather_objects
from shardwise.distributed.parameters import keep_notes
from shardwise.distributed.rng import derived_seed
from shardwise.errors import ConfigError, class_name, count, did_you_mean
from shardwise.plan import Plan
from shardwise.protocols import initializes_itself, optional

# Makes the initial weights, which depend on seed and model alone, not on the strategy or the number of ranks.
#
# A module that can initialise a layer (`init_module_weights(layer)`) is built without memory for its parameters. Then
# each layer is made on the device and initialised under its own seed, one unit at a time, so that no rank ever holds
# the whole model before it is sharded. Any other module is built on every rank and takes the parameters and buffers of
# rank 0, so that what its constructor did is kept.


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


# Freezes parts of a module: `freeze=` for the whole run, or for its first epochs (`freeze_epochs=`).
#
# A frozen part has no gradients and is in evaluation mode: batch norm normalises by its running statistics and keeps
# them, and dropout is off.

BACKBONE = "backbone"  # everything but the head, if no part has this name


def freeze_for_good(plan: Plan, module: nn.Module) -> None:
    """Freeze the parameters that are not trained in this run, before a strategy prepares them. Rank 0 says how many.

    Raises:
        ConfigError: the module has no part of this name, or nothing is left to train.
    """
    if not plan.freeze or plan.stage != "fit" or not isinstance(module, LightningModule):
        return
    is_frozen = frozen_names(plan, module)
    named = dict(module.named_parameters())
    frozen = [parameter for name, parameter in named.items() if is_frozen(name)]
    if plan.freeze_epochs is None:
        for parameter in frozen:
            parameter.requires_grad_(False)
        if not any(parameter.requires_grad for parameter in named.values()):
            raise ConfigError(f"freeze={_as_given(plan)} leaves no parameter to train: freeze less")
    if os.environ["RANK"] == "0":
        weights, total = (sum(p.numel() for p in of) for of in (frozen, named.values()))
        until = "" if plan.freeze_epochs is None else f" for the first {count(plan.freeze_epochs, 'epoch')}"
        print(
            f"frozen{until}: {weights:,} of {total:,} parameters (freeze={_as_given(plan)}); there batch norm keeps "
            f"its statistics and normalises by them, and dropout is off",
            flush=True,
        )


def frozen_names(plan: Plan, module: LightningModule) -> Callable[[str], bool]:
    """Whether a parameter or a layer of this name belongs to what `freeze=` names.

    Raises:
        ConfigError: the module has no part of this name.
    """
    names = {_plain(name) for name, _ in [*module.named_modules(), *module.named_parameters()]} - {""}
    head = optional(module, "head_name")
    parts = []
    for part in plan.freeze:
        if part in names:
            parts.append(part)
        elif part == BACKBONE and head is not None:
            over_head = {head[:i] for i, letter in enumerate(head) if letter == "."}
            parts += [name for name in names - over_head if name != head and not name.startswith(f"{head}.")]
        else:
            has = sorted({name.partition(".")[0] for name in names})
            why = (
                "; `backbone` would be all but its head, which it does not name by head_name"
                if part == BACKBONE
                else ""
            )
            near = did_you_mean(part, [*has, BACKBONE])
            raise ConfigError(
                f"freeze={part}: {class_name(module)} has no part of this name{near}{why}; give the name of a layer or "
                f"a parameter, as named_modules() has it, below {', '.join(has[:8])}"
            )
    chosen = set(parts)

    def is_frozen(name: str) -> bool:
        name = _plain(name)
        return name in chosen or any(name[:i] in chosen for i, letter in enumerate(name) if letter == ".")

    return is_frozen


def _plain(name: str) -> str:
    return name.replace(COMPILED, "")


def _as_given(plan: Plan) -> str:
    return plan.freeze[0] if len(plan.freeze) == 1 else f"[{','.join(plan.freeze)}]"
