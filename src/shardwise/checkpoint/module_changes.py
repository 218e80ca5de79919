"""What hooks change of a module in the course of a run besides its numbers: which weights are trained, the modes of
layers, the shapes of buffers.

A checkpoint has what differs from the beginning of the run. A run that goes on begins as its own code says, and is
then changed in the same way: so it equals the run that was saved, and what its code does otherwise by now holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from shardwise.checkpoint.state import persistent_buffers
from shardwise.lightning_internals.loops import training_modes

_OF_BATCH_NORM = "track_running_stats"  # whoever freezes a BatchNorm sets it


class ModuleChanges:
    """Compares a module with itself at the beginning of the run, and makes the changes of a checkpoint again."""

    def __init__(self, module: LightningModule, gather: Callable[[Any], list[Any]]) -> None:
        """Call it before a hook of the run has changed a buffer.

        `gather`: gives the parts of all ranks that have different layers.
        """
        self.module, self.gather = module, gather
        self._shapes = _shapes(module)
        self._flags: dict[str, dict[str, bool]] = {}
        self._saved: Mapping[str, Any] = {}  # those of the checkpoint that the run goes on from

    def begin_training(self) -> None:
        """Note what holds before the first step, and set what a checkpoint has otherwise."""
        self._flags = self._flags_now()
        parameters, layers = dict(self.module.named_parameters()), dict(self.module.named_modules())
        for name, needs in self._saved.get("requires_grad", {}).items():
            if name in parameters:
                parameters[name].requires_grad_(needs)
        for flag in ("training", _OF_BATCH_NORM):
            for name, value in self._saved.get(flag, {}).items():
                if name in layers:
                    setattr(layers[name], flag, value)

    def found(self) -> dict[str, Any]:
        """What differs now, for a checkpoint: kind → name → value; of buffers, the shape that each began with.

        Collective in a pipeline.
        """
        now, shapes = self._flags_now() if self._flags else {}, _shapes(self.module)
        changed: dict[str, dict[str, Any]] = {
            kind: {name: value for name, value in flags.items() if self._flags[kind].get(name, value) != value}
            for kind, flags in now.items()
        }
        # A stage of a pipeline has not all of the buffers any more that the module began with
        changed["buffers"] = {n: self._shapes.get(n) for n, shape in shapes.items() if self._shapes.get(n) != shape}
        parts = self.gather(changed)
        merged = {kind: {k: v for part in parts for k, v in part[kind].items()} for kind in changed}
        return {"module_changes": merged}

    def _flags_now(self) -> dict[str, dict[str, bool]]:
        layers = self.module.named_modules()
        return {
            "requires_grad": {name: p.requires_grad for name, p in self.module.named_parameters()},
            "training": training_modes(self.module.trainer),
            _OF_BATCH_NORM: {name: getattr(layer, _OF_BATCH_NORM) for name, layer in layers
                             if hasattr(layer, _OF_BATCH_NORM)},
        }  # fmt: skip

    def take(self, saved: Mapping[str, Any], metadata: Metadata, device: torch.device) -> None:
        """Take the changes of a checkpoint: give buffers that begin as they did there the shapes that they have there.

        `metadata`: the checkpoint's.
        """
        self._saved = saved
        layers = dict(self.module.named_modules())
        for name, began in saved.get("buffers", {}).items():
            known: Any = metadata.state_dict_metadata.get(f"model.{name}")
            layer, _, key = name.rpartition(".")
            if (
                known is None
                or layer not in layers
                or self._shapes.get(name) != (None if began is None else tuple(began))
            ):
                continue  # the code is another by now, and names and shapes are compared as ever
            before = layers[layer]._buffers.get(key)
            dtype = known.properties.dtype if before is None else before.dtype
            layers[layer]._buffers[key] = torch.empty(known.size, dtype=dtype, device=device)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(buffer.shape) for name, buffer in persistent_buffers(module)}
