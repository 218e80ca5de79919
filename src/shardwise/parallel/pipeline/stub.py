"""What stands in the module in place of a layer of another stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.parallel.pipeline.absent import absent_weight


class Stub(nn.Module):
    """Stands in the place of a layer that does not run. Its only weights are those shared with one that does.

    `shows`: whether who walks through the module's weights is shown stand-ins for those of the layer. A sum over the
    weights that are here alone would pass for one over all.
    """

    def __init__(self, layer: nn.Module, run: Callable[..., Any], shows: Callable[[], bool], device: Any) -> None:
        super().__init__()
        self.__dict__["layer"], self.__dict__["run"] = layer, run
        self.__dict__["_parameters"] = _Weights(layer, shows, device)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["run"](*args, **kwargs)


class _Weights(dict[str, Any]):
    """The weights of a stub, whose `items` every walk through a module's weights goes through."""

    def __init__(self, layer: nn.Module, shows: Callable[[], bool], device: torch.device) -> None:
        super().__init__()
        self._layer, self._shows, self._device = layer, shows, device

    def items(self) -> Any:
        if not self._shows():
            return super().items()
        found: dict[str, Tensor] = {
            name: absent_weight(p, self._device) if p.is_meta else p
            for name, p in self._layer.named_parameters()
            if p.is_floating_point()
        }
        return (found | dict(self)).items()
