"""Reads a checkpoint's weights without a process group, one tensor at a time, whatever strategy has written it."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.checkpoint.chunks import whole
from shardwise.checkpoint.dcp import read_tensors
from shardwise.checkpoint.metadata import read_metadata
from shardwise.checkpoint.state import names_left_out, persistent_buffers, shapes_of, unlike
from shardwise.config.targets import build, locate
from shardwise.errors import ConfigError
from shardwise.protocols import initializes_itself
from shardwise.weights.initialize import parameters_on_meta, replace_parameters


class SavedWeights:
    """The parameters and persistent buffers of a checkpoint, by the module's names.

    `average`: the moving average of those that have one.

    Raises:
        ConfigError: the average is asked for, and the checkpoint has none.
    """

    def __init__(self, checkpoint: Path, *, average: bool = False) -> None:
        self.checkpoint, self._metadata = checkpoint, read_metadata(checkpoint)
        self._known = cast(dict[str, Any], self._metadata.state_dict_metadata)
        if average and not any(name.startswith("average.") for name in self._known):
            raise ConfigError(
                f"weights=average: {checkpoint} holds no average, the run had no ema_decay; give weights=model"
            )
        names = [name.removeprefix("model.") for name in self._known if name.startswith("model.")]
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(self._known[f"model.{name}"].size) for name in names}
        self._sources = {name: self._source(name, average) for name in names}

    def _source(self, name: str, average: bool) -> str:
        """The checkpoint's name of a tensor; of the model's if there is no average, as for frozen parameters."""
        source = f"average.{name}"
        return source if average and source in self._known else f"model.{name}"

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that a tensor was saved in."""
        found: torch.dtype = self._known[self._sources[name]].properties.dtype
        return found

    def read(self, name: str) -> Tensor:
        """A tensor, on the CPU."""
        values = torch.empty(self.shapes[name], dtype=self.dtype(name))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            read_tensors(self.checkpoint, {self._sources[name]: whole(values)}, None, self._metadata)
        return values


def build_saved(
    node: dict[str, Any], weights: SavedWeights, device: torch.device, dtype: torch.dtype | None = None
) -> nn.Module:
    """Build the module of a Plan, with the saved weights on `device`. It is in evaluation mode.

    `dtype`: of floating-point parameters; None: as they were saved.

    Raises:
        ConfigError: the module has other weights than were saved.
    """
    target = locate(node["_target_"], "module")
    with parameters_on_meta() if initializes_itself(target) else nullcontext():
        module: nn.Module = build(node, "module")
    kept = names_left_out(module) - weights.shapes.keys()  # these have the values that the constructor gives them
    shapes = {name: shape for name, shape in shapes_of(module).items() if name not in kept}
    if difference := unlike(shapes, weights.shapes, node["_target_"], str(weights.checkpoint)):
        raise ConfigError(f"{node['_target_']} has other weights now than were saved: {difference}")
    made: dict[int, nn.Parameter] = {}  # by id, so that tied parameters stay one
    for name, parameter in module.named_parameters():
        values = parameter.detach() if name in kept else weights.read(name)
        to = dtype if dtype is not None and values.is_floating_point() else values.dtype
        made[id(parameter)] = nn.Parameter(values.to(device, to), requires_grad=False)
    replace_parameters(module, made)
    for name, buffer in persistent_buffers(module):
        if name not in kept:
            buffer.copy_(weights.read(name))
    return module.to(device).eval()
