"""Buffers of a module itself in a pipeline, where the last stage alone runs what is behind the layers."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from shardwise.errors import ConfigError, class_name


class OwnBuffers:
    """Sees on the last stage, which runs all of a step but the layers, what the step does with buffers of `module`."""

    def __init__(self, module: LightningModule) -> None:
        self.module_name = class_name(module)
        self._read: set[str] = set()
        self._read_before: set[str] = set()  # before the layers
        self._at_layers: dict[str, Any] = {}  # what tells whether a buffer was written since
        self._buffers = _Noting(module._buffers, self._read)
        module.__dict__["_buffers"] = self._buffers

    def begin(self) -> None:
        """A step begins."""
        self._read.clear()

    def enter_layers(self) -> None:
        """The step has come to the layers that repeat."""
        self._read_before, self._at_layers = set(self._read), self._versions()

    def check(self) -> None:
        """Refuse a buffer that other stages would have read with an old value.

        Raises:
            ConfigError
        """
        written = {name for name, version in self._versions().items() if version != self._at_layers.get(name)}
        for name in sorted(written & self._read_before):
            raise ConfigError(
                f"{self.module_name}: training_step reads the buffer {name!r} before the layers that repeat and writes "
                f"it behind them, which only the last stage of a pipeline does: others would go on with its old value; "
                f"write it before the layers, read it behind them, or use strategy.pipeline_parallel_size=1"
            )

    def _versions(self) -> dict[str, Any]:
        return {
            name: (id(b), None if b.is_inference() else b._version)
            for name, b in self._buffers.items()
            if b is not None
        }


class _Noting(dict[str, Tensor | None]):
    """Notes what is read by name, as an attribute of the module is."""

    def __init__(self, buffers: dict[str, Tensor | None], read: set[str]) -> None:
        super().__init__(buffers)
        self.read = read

    def __getitem__(self, name: str) -> Tensor | None:
        self.read.add(name)
        return super().__getitem__(name)
