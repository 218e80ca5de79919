"""Lets layers that a hook runs compute as in a step: there autocast is on, and parameters have copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torchmetrics import Metric

from shardwise.parallel.precision import cast_floating


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
