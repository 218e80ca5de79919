"""Lightning's hooks about checkpoints. `TrainState` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer

from shardwise.checkpoint.dcp import TensorWriter
from shardwise.checkpoint.publish import SaveError, publish
from shardwise.checkpoint.train_state import TrainState
from shardwise.errors import first_of
from shardwise.plan import Plan
from shardwise.step.precision_plugin import PlannedPrecision
from shardwise.strategies.sharded_state import DTensorState
from shardwise.weights.init_from import read_initial


class CheckpointHooks(Strategy):
    """Implements the checkpoint hooks of every strategy."""

    plan: Plan
    sharded: DTensorState
    state: TrainState  # collects and restores what is in a checkpoint

    def file_group(self) -> dist.ProcessGroup | None:
        """The group of all hosts for work on files."""
        raise NotImplementedError

    @property
    def planned_precision(self) -> PlannedPrecision:
        raise NotImplementedError

    def _end_setup(self) -> None:
        """Note what the run begins with, and read the weights of `init_from=` unless a checkpoint is resumed."""
        lines = []
        if self.state.is_training:
            self.sharded.note_groups()
            if self.sharded.left_out and self.plan.checkpoint.saves:
                left_out = first_of(sorted(self.sharded.left_out))
                lines = [f"checkpoints leave out {left_out}, as the module's state_dict does (strict_loading=False)"]
        if self.plan.init_from is not None and self.plan.resume is None:
            lines.append(f"weights: {read_initial(self.sharded, self.state.module, self.plan)}")
            self.sharded.refresh_low_precision_copies()
        if self.is_global_zero:
            print("".join(f"{line}\n" for line in lines), end="", flush=True)

    def on_train_start(self) -> None:
        self.state.changes.begin_training()
        super().on_train_start()

    def exchange_average(self) -> None:
        """Exchange the weights and their average in place, when no checkpoint is copied from them any more."""
        self.planned_precision.wait_for_checkpoint_copy()
        self.sharded.exchange_average()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint for `trainer.save_checkpoint`. Collective; waits until it is written."""
        with self.sharded.with_shards():  # a hook that saves may have whole weights
            self._save(checkpoint, Path(filepath))

    def _save(self, checkpoint: dict[str, Any], path: Path) -> None:
        content = self.state.pack(checkpoint | self.state.changes.found())
        exchanged = self.sharded.exchanged  # within an evaluation the module has the average
        if exchanged:
            self.exchange_average()
        try:
            publish(path, self.state.snapshot(content), TensorWriter(self.file_group()))
        except SaveError as error:
            raise OSError(f"{path} could not be written: {error}") from None
        finally:
            if exchanged:
                self.exchange_average()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self.state.load(Path(checkpoint_path))

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # set-up initialises the parameters, and would overwrite values loaded before

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Restore what hooks made of the optimizers' groups: `load_checkpoint` has restored the rest."""
        self.state.groups.restore()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # `state` saves the parameters

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Do nothing, since `load_checkpoint` has restored the weights."""
