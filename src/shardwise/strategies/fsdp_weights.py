"""Whole weights in the places of FSDP2's shards: for hooks of a run, an epoch or a validation, and for others that ask.

The hook sees plain tensors, and may write into them. A layer that runs in the hook runs as in a step: for its time the
shards are back in their places, with what was written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.distributed.dtensor import listing_whole, local_part, reading_whole, whole_tensor
from shardwise.distributed.parameters import (
    keep_attributes,
    keep_notes,
    refuse_gradient_hooks,
    renew_optimizer,
    renew_references,
)
from shardwise.errors import ConfigError
from shardwise.lightning_internals.hooks import LOOK_AT_GRADIENTS, NOT_GATHERED, has_weights
from shardwise.lightning_internals.results import LoggedValue
from shardwise.parallel.precision import dtype_of
from shardwise.parallel.tensor_parallel import divided_layers
from shardwise.strategies import fsdp_gathering, fsdp_step
from shardwise.strategies.fsdp_gathering import free_gathered
from shardwise.strategies.fsdp_views import ShardsInHooks
from shardwise.strategies.sharded_state import DTensorState
from shardwise.strategies.weights_in_hooks import WeightsInHooks
from shardwise.strategies.whole_weights import explaining_parts, groups_of


class FsdpWeights(WeightsInHooks):
    """Weights of which each rank has a part. Hooks of a batch see these parts, with `shards` around them."""

    hides = True
    shards: ShardsInHooks

    def take_shards(self, shards: ShardsInHooks) -> None:
        self.shards = shards

    def around_hook(self, hook: str, *, whole: bool) -> AbstractContextManager[None]:
        if hook not in NOT_GATHERED:
            around = super().around_hook(hook, whole=whole)
            return around if whole or not has_weights(hook) else explaining_parts(hook, self.strategy)
        if hook not in LOOK_AT_GRADIENTS:
            return self.shards.around_hook(hook)
        numbers = (
            listing_whole()
            if self.strategy.sharded.tensor_parallel is None
            else fsdp_step.refused(f"{hook} of {self.name}")
        )
        return self.shards.around_hook(hook, numbers)

    def read_whole_numbers(self) -> None:
        """From here to the end of the run, numbers that are read of weights and gradients are those of whole ones."""

        def read(part: DTensor) -> Tensor:
            if self.strategy.sharded.tensor_parallel is not None:
                raise fsdp_step.read_by(self.name)
            return part.full_tensor()

        reading = ExitStack()
        reading.enter_context(reading_whole(read))
        self.strategy.closing.add(reading.close)

    def take_logged(self, logged: LoggedValue) -> Any:
        if self.strategy.sharded.tensor_parallel is not None and isinstance(logged.value, DTensor):
            raise fsdp_step.read_by(f"{logged.hook} of {self.name}")
        assert self.strategy.shared is not None
        return self.strategy.shared.take_logged(replace(logged, value=whole_tensor(logged.value)))

    @contextmanager
    def make_whole(self, hook: str) -> Iterator[None]:
        """Gather the master weights. What the hook writes into them is copied into the shards afterwards."""
        self.strategy.planned_precision.wait_for_checkpoint_copy()
        try:
            with whole_in_place_of_shards(self.module, self.strategy.sharded):
                yield
            refuse_gradient_hooks(self.module, self.name, self.plan.strategy.name)
        except AssertionError as error:
            if "does not support deepcopy" not in str(error):
                raise
            raise ConfigError(
                f"{hook} of {self.name} or of a callback copies layers that {self.plan.strategy.name} shards: "
                f"make the copy in __init__, and write the weights into it here, or use strategy=ddp"
            ) from error

    def _bytes_to_gather(self) -> int:
        width = dtype_of(self.plan.precision.compute_dtype).itemsize
        return sum(p.numel() * width for unit in self._freed_units() for p in unit.parameters())

    def _gathering(self) -> AbstractContextManager[None]:
        self.strategy.refresh_float8()
        return fsdp_gathering.kept_gathered(self._freed_units())

    def _freed_units(self) -> list[Any]:
        """The units that are freed after their forward pass, and gathered again for the next one."""
        units = [unit for _, unit in self.strategy.units.modules] if self.plan.strategy.reshard_after_forward else []
        return [unit for unit in units if isinstance(unit, FSDPModule)]


@contextmanager
def whole_in_place_of_shards(module: LightningModule, state: DTensorState) -> Iterator[None]:
    """Gather all weights of `module`; at the end, copy them into the shards. Collective, as layers inside are."""
    free_gathered(module)
    whole = _WholeWeights(module, state)
    try:
        with whole.lent_to_layers(), state.found_by(whole.shards_in_place):
            yield
    finally:
        whole.put_back()


class _WholeWeights:
    """Whole weights in the places of sharded ones."""

    def __init__(self, module: LightningModule, state: DTensorState) -> None:
        self.module, self.state = module, state
        self.names = {id(p): name for name, p in module.named_parameters()}
        self.layers: list[Any] = [layer for layer in module.modules() if isinstance(layer, FSDPModule)]
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
        self._running = 0  # units, one within another
        self.lent: dict[nn.Module, dict[str, Any]] = {}  # layers that run with parts → their whole weights
        self._place()
        renew_references(self.module, lambda p: self.wholes.get(id(p), p))

    def _place(self) -> None:
        """Put the whole weights in the places of the shards."""
        for layer, key, p in self.places:
            layer._parameters[key] = self.wholes[id(p)]

    def _replace(self) -> None:
        """Put the shards back in their places, with what was written."""
        p: Any
        trained = {id(p): getattr(layer, key).requires_grad for layer, key, p in self.places}
        free_gathered(self.module)  # a backward pass in the hook leaves gathered weights in the places
        for layer, key, p in self.places:
            if not isinstance(present := layer._parameters[key], DTensor):
                self.wholes[id(p)] = present  # the hook may have replaced it
            layer._parameters[key] = p
        for of, p in self.shards.items():  # all of them, since a write through p.data cannot be seen
            self._write(p)
            for tensor in (p, self.wholes[of]):  # the hook may have frozen it, or let it be trained
                tensor.requires_grad_(trained[of])
        for group in (group for layer in self.layers for group in groups_of(layer._get_fsdp_state())):
            # The streams on which it gathers have to wait for what was written
            group._wait_all_gather_streams_on_event(group.device_handle.current_stream().record_event())

    def put_back(self) -> None:
        """Let the module have its shards again for good."""
        self._replace()
        p: Any
        for of, p in self.shards.items():
            keep_notes(p, self.wholes[of])
        renew_references(self.module)  # what the hook has kept, or has given to an optimizer
        for optimizer in self.state.optimizers():
            renew_optimizer(optimizer)
            getattr(optimizer, "take_shards", lambda: None)()

    def _write(self, shard: DTensor) -> None:
        whole = self.wholes[id(shard)].detach()
        for chunk in self.state.chunks_of(self.names[id(shard)], shard)(local_part(shard.detach())):
            region = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.values.shape, strict=True))
            chunk.values.copy_(whole[region])

    @contextmanager
    def lent_to_layers(self) -> Iterator[None]:
        """Inside, a unit that runs finds the shards in their places, as in a step.

        Layers of a tensor axis that FSDP2 does not gather by themselves compute with this rank's part.
        """
        of = self.state.tensor_parallel
        divided = [] if of is None else [of.module.get_submodule(name) for name in divided_layers(of.layers)]
        with ExitStack() as stack:
            for layer in dict.fromkeys(layer for layer, _, _ in self.places):
                stack.enter_context(_loaded_whole(layer))
            for layers, begin, end in (
                (divided, self._use_part, self._use_whole),
                (self.layers, self._begin, self._end),  # comes before, where a unit is a layer that is divided
            ):
                for layer in layers:
                    stack.callback(layer.register_forward_pre_hook(begin, prepend=True).remove)
                    stack.callback(layer.register_forward_hook(end, always_call=True).remove)
            yield

    @contextmanager
    def shards_in_place(self) -> Iterator[None]:
        """Inside, the module has its shards, with what was written."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    def _begin(self, *unit_and_arguments: Any) -> None:
        if not self._running:
            self._replace()
        self._running += 1

    def _end(self, *unit_arguments_and_output: Any) -> None:
        self._running -= 1
        if not self._running:
            free_gathered(self.module)  # a root, too: the next pass has to gather what the hook writes in between
            self._place()

    def _use_part(self, layer: nn.Module, args: Any) -> None:
        """Let a layer compute with this rank's part of its weights, as its exchange with its peers expects."""
        for owner, key, shard in self.places if not self._running else ():
            if owner is layer and (cut := self.state.cuts.get(self.names[id(shard)])) is not None:
                whole = layer._parameters[key]
                part = self.wholes[id(shard)].detach().narrow(cut.dim, cut.start, shard.shape[cut.dim])
                layer._parameters[key] = nn.Parameter(part, requires_grad=False)
                self.lent.setdefault(layer, {})[key] = whole

    def _use_whole(self, layer: nn.Module, args: Any, output: Any) -> None:
        layer._parameters.update(self.lent.pop(layer, {}))


@contextmanager
def _loaded_whole(layer: nn.Module) -> Iterator[None]:
    """Inside, FSDP2 does not look for shards behind a `load_state_dict` of `layer`."""
    hooks = layer._load_state_dict_post_hooks
    layer._load_state_dict_post_hooks = OrderedDict(
        (key, hook) for key, hook in hooks.items() if not hook.__module__.startswith("torch.distributed.fsdp.")
    )
    try:
        yield
    finally:
        layer._load_state_dict_post_hooks = hooks
