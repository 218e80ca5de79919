"""Weights outside of steps: as hooks see them, and gathered for many forward passes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torchmetrics import Metric

from shardwise import accelerator
from shardwise.data.streams import smallest
from shardwise.errors import ConfigError
from shardwise.lightning_internals.hooks import current_hook
from shardwise.parallel.precision import cast_floating, dtype_of
from shardwise.plan import Plan

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_SPARE = 0.1  # of all memory is left for what the forward passes need


class WeightsInHooks:
    """What hooks see of weights. Here every rank has all of them; a strategy that shards them extends this."""

    hides = False  # whether weights are sharded outside a forward, or a hook's writes into them may be lost

    def __init__(self, strategy: Any) -> None:
        plan: Plan = strategy.plan
        self.strategy, self.plan = strategy, plan
        self.layers: LayersInHooks | None = None  # that hooks run, in low precision
        self._is_whole = self._told_of_no_room = False  # whether weights are whole at the moment

    @property
    def module(self) -> LightningModule:
        module: LightningModule = self.strategy.module
        return module

    @property
    def name(self) -> str:
        """That of the module's class."""
        return str(self.strategy.module_name)

    def run_layers_as_in_steps(self, module: LightningModule) -> None:
        """Let layers that hooks run compute as in a step."""
        if self.plan.precision.is_low:
            self.layers = LayersInHooks(module, self._as_in_steps, dtype_of(self.plan.precision.parameter_dtype))

    def _as_in_steps(self) -> AbstractContextManager[None]:
        if self.hides:  # then every rank runs the layers that one of them runs
            self.strategy.refresh_float8()
        around: AbstractContextManager[None] = self.strategy.step_forward.as_in_steps()
        return around

    def whole(self) -> AbstractContextManager[None]:
        """Make all weights whole inside, as they are under ddp. Collective.

        Raises:
            ConfigError: in a step, whose layers gather their own weights.
        """
        hook = current_hook(self.module) or "a hook"
        if hook in _STEPS and self.hides:
            raise ConfigError(
                f"gathered_weights in {hook} of {self.name}: there layers gather their own weights "
                f"under {self.plan.strategy.name}; use it in a hook, on_train_batch_start or on_train_batch_end, say"
            )
        return nullcontext() if self._is_whole else self._whole_in(hook)

    @contextmanager
    def _whole_in(self, hook: str) -> Iterator[None]:
        self._is_whole = True
        try:
            with self.make_whole(hook):
                yield
        finally:
            self._is_whole = False

    @contextmanager
    def make_whole(self, hook: str) -> Iterator[None]:
        """What makes all weights whole around a hook of this name. Collective."""
        yield

    def around_hook(self, hook: str, *, whole: bool) -> AbstractContextManager[None]:
        """What is put around a hook of the module or of a callback. `whole`: it sees whole weights."""
        return self._whole_in(hook) if whole and not self._is_whole and self._has_room(hook) else nullcontext()

    def _has_room(self, hook: str) -> bool:
        """Whether every rank has memory for whole weights; if not, `hook` sees what there is. Collective."""
        needed = self._bytes_of_whole()
        if smallest(int(needed <= max(0, _free_bytes(self.strategy.root_device))), self.strategy.file_group):
            return True
        if not self._told_of_no_room and self.strategy.is_global_zero:
            self._told_of_no_room = True
            print(
                f"{hook} sees parts of weights: whole ones are {needed / 1e9:.1f} GB, more than a rank has left",
                flush=True,
            )
        return False

    def _bytes_of_whole(self) -> int:
        """How much more memory a rank needs for whole weights."""
        return sum(p.numel() * p.itemsize for p in self.module.parameters() if isinstance(p, DTensor))

    def outside_steps(self) -> list[AbstractContextManager[None]]:
        """What is put around hooks of the module and of callbacks, in which layers may run on anything."""
        shared = self.strategy.shared
        of_layers: list[AbstractContextManager[None]] = [] if self.layers is None else [self.layers.found()]
        return of_layers if shared is None else [*of_layers, *shared.outside_steps()]

    @contextmanager
    def kept_gathered(self) -> Iterator[None]:
        """Inside, forward passes without gradients find all weights gathered, if every rank has memory for that.

        Layers that training has compiled are not compiled again for each length of a text. Collective.
        """
        # A stance imports the compiler, which a run without it does not wait for.
        eager: Any = torch.compiler.set_stance("force_eager") if self.plan.compile.name == "layer" else nullcontext()
        needed = self._bytes_to_gather()
        has_room = needed == 0 or bool(
            smallest(int(needed <= _free_bytes(self.strategy.root_device)), self.strategy.file_group)
        )
        with eager, self._gathering() if needed and has_room else nullcontext():
            yield

    def _bytes_to_gather(self) -> int:
        """How much more memory a rank needs for all weights. Every rank gives 0, or none does."""
        return 0

    def _gathering(self) -> AbstractContextManager[None]:
        return nullcontext()


def _free_bytes(device: torch.device) -> int:
    """The memory that this rank may still use; below 0 where there is none to spare."""
    if device.type != "cpu":
        free, total = accelerator.free_and_total(device)
        return int(free + accelerator.reserved(device) - accelerator.allocated(device) - _SPARE * total)
    free, total = (os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
    return int((free - _SPARE * total) / int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


# Lets layers that a hook runs compute as in a step: there autocast is on, and parameters have copies.


class LayersInHooks:
    """Finds calls of `module` and of its layers, runs each inside `as_in_steps()`, and casts what it gives to `dtype`.

    A layer without parameters and the networks of metrics compute in the precision of their inputs.
    """

    def __init__(
        self, module: nn.Module, as_in_steps: Callable[[], AbstractContextManager[Any]], dtype: torch.dtype
    ) -> None:
        self.module, self.as_in_steps, self.dtype = module, as_in_steps, dtype
        self._running = ExitStack()  # of the innermost `found`
        # The same hook each time: what is compiled in a hook would else be compiled again in the next.
        self._looking = register_module_forward_pre_hook(self._begin)
        self._looking.remove()

    @contextmanager
    def found(self) -> Iterator[None]:
        """Put this around a hook. One may run within another."""
        _ = self._layers  # what is traced is not to compute it
        outer, looked = self._running, self._look()
        try:
            with ExitStack() as self._running:
                yield
        finally:
            self._running = outer
            if not looked:
                self._looking.remove()

    def _look(self) -> bool:
        """Look for layers from here on. Returns whether that was so before."""
        hooks = self._looking.hooks_dict_ref()
        assert hooks is not None  # it is torch's own, of all modules
        looked = self._looking.id in hooks
        hooks[self._looking.id] = self._begin
        return looked

    def _begin(self, layer: nn.Module, args: Any) -> None:
        if layer in self._layers:
            self._looking.remove()  # what the layer calls is within; and a graph that is compiled now knows no hook
            self._running.callback(layer.register_forward_hook(self._end, always_call=True).remove)
            self._running.enter_context(self.as_in_steps())

    def _end(self, layer: nn.Module, args: Any, output: Any) -> Any:
        self._running.close()
        self._look()
        return cast_floating(output, self.dtype)

    @cached_property
    def _layers(self) -> set[nn.Module]:
        layers = list(self.module.modules())
        of_metrics = {part for metric in layers if isinstance(metric, Metric) for part in metric.modules()}
        return {layer for layer in layers if layer not in of_metrics and any(True for _ in layer.parameters())}
