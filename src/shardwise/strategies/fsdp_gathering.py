"""When FSDP2 gathers a unit's parameters, and what it keeps of them between the forward and the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.fsdp import FSDPModule, _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from shardwise.distributed.mesh import limit_wait
from shardwise.errors import ConfigError, class_name
from shardwise.parallel.units import Units
from shardwise.plan import Plan
from shardwise.strategies.whole_weights import free_layers, groups_of


def check_prefetch(module: LightningModule, units: Units, plan: Plan) -> None:
    """Refuse to prefetch where there is nothing to prefetch, or where weights change before they are used.

    Raises:
        ConfigError
    """
    words = {"forward_prefetch_units": plan.strategy.forward_prefetch_units,
             "backward_prefetch_units": plan.strategy.backward_prefetch_units}  # fmt: skip
    given = " ".join(f"strategy.{word}={value}" for word, value in words.items() if value is not None)
    if given and not module.automatic_optimization:
        raise ConfigError(
            f"{given}: {class_name(module)} optimizes by hand, and may change weights that were gathered ahead; "
            f"leave it out"
        )
    if given and not units.modules:
        raise ConfigError(
            f"{given}: layers that repeat are gathered ahead, and {class_name(module)} has none: leave it out, or "
            f"name layers by their classes, e.g. units=[Block]"
        )


def set_prefetch(root: nn.Module, units: Units, plan: Plan) -> None:
    """Let each unit issue the all-gathers of units that come after it, and in the backward pass of those before it.

    The order is that of the module's definition. A unit that is gathered and then does not run costs time alone.
    """
    modules = [root, *(unit for _, unit in units.modules)]
    layers: list[Any] = [layer for layer in modules if isinstance(layer, FSDPModule)]
    forward, backward = plan.strategy.forward_prefetch_units, plan.strategy.backward_prefetch_units
    for i, layer in enumerate(layers):
        if forward is not None:
            layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + forward])
        if backward is not None:  # the root begins the backward pass, and stays gathered until its end
            before = layers[1:i] if i else layers[1:]
            layer.set_modules_to_backward_prefetch(before[::-1][:backward])


def allow_any_layout(kind: type) -> None:
    """Let FSDP2 change the class of layers whose first parent has no `__dict__`: class Net(ABC, nn.Module).

    Its own class, with FSDPModule as the first parent, has another layout in memory, and Python refuses it.
    """
    fsdp: Any = _fully_shard._fully_shard
    base = kind
    while base.__base__ is not None and base.__base__.__dictoffset__:
        base = base.__base__
    if base.__base__ is not object and kind not in fsdp.cls_to_fsdp_cls:
        body = {"__deepcopy__": fsdp._unimplemented_deepcopy, "__new__": lambda _, *args, **more: kind(*args, **more)}
        fsdp.cls_to_fsdp_cls[kind] = type(kind)(kind.__name__, (kind, FSDPModule), body)


def before_gathering(group: Any, call: Callable[[], None]) -> None:
    """Call `call` whenever the weights of `group` are about to be gathered."""

    def unshard(*args: Any, **kwargs: Any) -> None:
        if not group.is_unsharded and group._all_gather_result is None:
            call()
        gather(*args, **kwargs)

    gather, group.unshard = group.unshard, unshard


@contextmanager
def one_mesh_for_all_units(plan: Plan) -> Iterator[None]:
    """Let units that are sharded inside share the mesh of `strategy.reshard_after_forward=N`.

    FSDP2 would make groups of ranks for each unit, and NCCL needs memory for each group.
    """
    fsdp: Any = _fully_shard._fully_shard
    make, made = fsdp._get_post_forward_mesh_info, list[Any]()

    def make_once(reshard_after_forward: bool | int, mesh_info: Any) -> Any:
        if isinstance(reshard_after_forward, bool):
            return make(reshard_after_forward, mesh_info)
        if not made:
            made.append(make(reshard_after_forward, mesh_info))
            limit_wait(made[0].shard_process_group, plan)
        return made[0]

    with patch.object(fsdp, "_get_post_forward_mesh_info", make_once):
        yield


@contextmanager
def kept_gathered(units: Sequence[Any]) -> Iterator[None]:
    """Gather units once for many forward passes, and free them at the end. Collective."""
    groups = [group for unit in units for group in groups_of(unit._get_fsdp_state())]
    before = [group.post_forward_mesh_info for group in groups]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for group, mesh_info in zip(groups, before, strict=True):
            group.post_forward_mesh_info = mesh_info
        for unit in units:
            unit.reshard()


@contextmanager
def switched_off(layers: Sequence[FSDPModule], *names: str) -> Iterator[None]:
    """Inside, these switches of FSDP2 (`set_requires_gradient_sync`, say) are off in `layers`."""
    switches = [getattr(layer, name) for name in names for layer in layers]
    for switch in switches:
        switch(False, recurse=False)
    try:
        yield
    finally:
        for switch in switches:
            switch(True, recurse=False)


def free_gathered(module: nn.Module) -> None:
    """`free_layers` for all layers of `module`."""
    free_layers(layer for layer in module.modules() if isinstance(layer, FSDPModule))


# Lets a weight be frozen, or trained again, while FSDP2 has gathered its layer.


def keep_frozen() -> Callable[[], None]:
    """From here on, the `requires_grad` that is set on a gathered weight holds for its shard. Returns the undoing.

    FSDP2 gives a gathered weight that of its shard, and not the other way round (as of torch 2.13). A step that takes a
    gradient with regard to its inputs while weights are frozen finds them gathered when it lets them be trained again.
    """
    gather, free, free_partly = FSDPParam.to_unsharded, FSDPParam.to_sharded, FSDPParam.to_sharded_post_forward

    def gathering(parameter: Any) -> None:
        gather(parameter)
        parameter.gathered_as = parameter.sharded_param.requires_grad

    def freeing(parameter: Any, original: Callable[[Any], None]) -> None:
        gathered, before = getattr(parameter, "_unsharded_param", None), getattr(parameter, "gathered_as", None)
        # If the shard's own has been changed meanwhile, that is what the user wants.
        if gathered is not None and before is not None and parameter.sharded_param.requires_grad == before:
            parameter.sharded_param.requires_grad_(gathered.requires_grad)
        parameter.gathered_as = None
        original(parameter)

    changes: dict[str, Callable[[Any], None]] = {
        "to_unsharded": gathering,
        "to_sharded": lambda parameter: freeing(parameter, free),
        "to_sharded_post_forward": lambda parameter: freeing(parameter, free_partly),
    }
    stack = ExitStack()
    for name, change in changes.items():
        stack.enter_context(patch.object(FSDPParam, name, change))
    return stack.close
