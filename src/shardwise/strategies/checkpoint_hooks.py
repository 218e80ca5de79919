"""What Lightning asks a strategy about checkpoints, which `TrainState` alone writes and reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer

from shardwise.checkpoint.dcp import TensorWriter
from shardwise.checkpoint.publish import SaveError, publish
from shardwise.checkpoint.train_state import TrainState


class CheckpointHooks(Strategy):
    """Mixed into every strategy."""

    state: TrainState  # knows everything that is in a checkpoint

    def file_group(self) -> dist.ProcessGroup | None:
        """For the coordination of files, which is the hosts'."""
        raise NotImplementedError

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Lightning's `trainer.save_checkpoint`. Collective; waits until it is written."""
        try:
            publish(Path(filepath), self.state.snapshot(self.state.pack(checkpoint)), TensorWriter(self.file_group()))
        except SaveError as error:
            raise OSError(f"{filepath} could not be written: {error}") from None

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self.state.load(Path(checkpoint_path))

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # setup makes the parameters: what was loaded before would be initialised over

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False  # load_checkpoint does

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # `state` knows where everything is

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """load_checkpoint has."""
