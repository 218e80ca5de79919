"""Whole weights for the time of a hook that looks at them, although FSDP2 has sharded them.

The hook sees plain tensors in place of the shards, and may write into them. Layers that run in the hook gather their
weights from the shards, as they do in a step: what was written is copied there first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from shardwise.distributed.dtensor import local_part
from shardwise.distributed.parameters import keep_attributes, keep_notes, renew_optimizer, renew_references
from shardwise.parallel.tensor_parallel import divided_layers
from shardwise.strategies import fsdp_gathering
from shardwise.strategies.sharded_state import DTensorState
from shardwise.strategies.whole_weights import groups_of


@contextmanager
def whole_in_place_of_shards(module: LightningModule, state: DTensorState) -> Iterator[None]:
    """Gather all weights of `module`; at the end, copy them into the shards. Collective, as layers inside are."""
    fsdp_gathering.free_gathered(module)
    whole = _WholeWeights(module, state)
    try:
        with whole.kept_while_layers_run():
            try:
                yield
            finally:  # here, where a layer that is freed takes over what was set on its gathered weights
                fsdp_gathering.free_gathered(module)
    finally:
        whole.put_back()


class _WholeWeights:
    """Whole weights in the places of sharded ones."""

    def __init__(self, module: LightningModule, state: DTensorState) -> None:
        self.module, self.state = module, state
        self.names = {id(p): name for name, p in module.named_parameters()}
        layers: list[Any] = [layer for layer in module.modules() if isinstance(layer, FSDPModule)]
        self.groups = [group for layer in layers for group in groups_of(layer._get_fsdp_state())]
        self.places: list[tuple[nn.Module, str, DTensor]] = [
            (layer, key, p)
            for layer in list(module.modules())
            for key, p in layer._parameters.items()
            if isinstance(p, DTensor)
        ]
        self.shards = {id(p): p for _, _, p in self.places}
        self.wholes: dict[int, Any] = {
            of: nn.Parameter(state.whole(self.names[of], p.detach()), p.requires_grad) for of, p in self.shards.items()
        }
        for of, shard in self.shards.items():
            keep_attributes(self.wholes[of], shard)
        self.lent: dict[nn.Module, dict[str, Any]] = {}  # layers that run with parts → their whole weights
        for layer, key, p in self.places:
            layer._parameters[key] = self.wholes[id(p)]
        renew_references(self.module, lambda p: self.wholes.get(id(p), p))

    def put_back(self) -> None:
        """Let the module have its shards again, with what was written."""
        p: Any
        for layer, key, p in self.places:
            self._take(p, layer._parameters[key])
            layer._parameters[key] = p
        for of, p in self.shards.items():  # all of them, since a write through p.data cannot be seen
            self._write(p)
            p.requires_grad_(self.wholes[of].requires_grad)  # the hook may have frozen it, or let it be trained
            keep_notes(p, self.wholes[of])
        renew_references(self.module)  # what the hook has kept, or has given to an optimizer
        for optimizer in self.state.optimizers():
            renew_optimizer(optimizer)
            getattr(optimizer, "take_shards", lambda: None)()
        for group in self.groups:  # a backward pass may follow, which gathers on other streams
            _let_gathers_wait(group)

    def _take(self, shard: DTensor, present: Any) -> None:
        """Note the tensor in the place of `shard`, which the hook may have replaced."""
        if not isinstance(present, DTensor):
            self.wholes[id(shard)] = present

    def _write(self, shard: DTensor) -> None:
        whole = self.wholes[id(shard)].detach()
        for chunk in self.state.chunks_of(self.names[id(shard)], shard)(local_part(shard.detach())):
            region = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.values.shape, strict=True))
            chunk.values.copy_(whole[region])

    @contextmanager
    def kept_while_layers_run(self) -> Iterator[None]:
        """Inside, FSDP2 gathers what was written, frees all layers after they ran, and leaves whole weights there.

        Layers of a tensor axis that FSDP2 does not gather by themselves compute with this rank's part.
        """
        changes: dict[tuple[type, str], Callable[..., Any]] = {
            (FSDPParamGroup, "unshard"): self._unshard,
            (FSDPParamGroup, "post_forward"): self._post_forward,
            (FSDPParam, "_setattr_on_modules"): self._set,
            (FSDPParam, "reset_sharded_param"): self._reset,
        }
        with ExitStack() as stack:
            for (owner, name), change in changes.items():
                stack.enter_context(patch.object(owner, name, _around(change, getattr(owner, name))))
            for layer in self._divided_layers():
                stack.callback(layer.register_forward_pre_hook(self._use_part).remove)
                stack.callback(layer.register_forward_hook(self._use_whole, always_call=True).remove)
            yield

    def _divided_layers(self) -> list[nn.Module]:
        """The layers of whose weights each rank of a tensor axis has a part."""
        of = self.state.tensor_parallel
        return [] if of is None else [of.module.get_submodule(name) for name in divided_layers(of.layers)]

    def _use_part(self, layer: nn.Module, args: Any) -> None:
        """Let a layer compute with this rank's part of its weights, as its exchange with its peers expects."""
        for owner, key, shard in self.places:
            cut, present = self.state.cuts.get(self.names[id(shard)]), owner._parameters[key]
            if owner is layer and cut is not None and present is not None and tuple(present.shape) == cut.shape:
                part = present.detach().narrow(cut.dim, cut.start, shard.shape[cut.dim])
                layer._parameters[key] = nn.Parameter(part, requires_grad=False)
                self.lent.setdefault(layer, {})[key] = present

    def _use_whole(self, layer: nn.Module, args: Any, output: Any) -> None:
        layer._parameters.update(self.lent.pop(layer, {}))

    def _unshard(self, original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        for parameter in group.fsdp_params if group.is_sharded else ():
            if (shard := self.shards.get(id(parameter.sharded_param))) is not None:
                info = parameter._module_info
                self._take(shard, info.module._parameters[info.param_name])
                self._write(shard)
                parameter.sharded_param.requires_grad_(self.wholes[id(shard)].requires_grad)
        _let_gathers_wait(group)  # the root has let them go on before this was written
        return original(group, *args, **kwargs)

    def _post_forward(self, original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(group, *args, **kwargs)
        group._to_sharded()  # a root, too: the next pass has to gather what the hook writes in between
        return output

    def _set(self, original: Callable[..., Any], parameter: Any, value: Any) -> Any:
        whole = self.wholes.get(id(value)) if value is parameter.sharded_param else None
        if whole is not None:
            whole.requires_grad_(value.requires_grad)  # it may have been set while the layer was gathered
        return original(parameter, value if whole is None else whole)

    def _reset(self, original: Callable[..., Any], parameter: Any) -> Any:
        """Do what FSDP2 does after a `load_state_dict` for shards alone."""
        info = parameter._module_info
        if isinstance(getattr(info.module, info.param_name), DTensor):
            original(parameter)


def _let_gathers_wait(group: Any) -> None:
    """Let the streams on which `group` gathers wait for what has been written by now."""
    group._wait_all_gather_streams_on_event(group.device_handle.current_stream().record_event())


def _around(change: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: change(original, *args, **kwargs)
