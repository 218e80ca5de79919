"""Checkpoints every N steps, the last K kept, the best by a metric kept as well."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.callbacks.steps import validation_metrics
from shardwise.checkpoints import checkpoint_path, list_checkpoints
from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.strategies.common import PlannedStrategy


class Saving(Callback):
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.best_score: float | None = None
        self.best_path: str | None = None
        self.saved_step = -1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = self.plan.checkpoint.save_every_n_steps
        if every and (batch_idx + 1) % self.plan.accumulate_grad_batches == 0 and trainer.global_step % every == 0:
            self._save_step(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        monitor = self.plan.checkpoint.monitor
        if monitor is None or trainer.state.fn != "fit":
            return
        measured = validation_metrics(trainer)
        if monitor not in measured:
            raise ConfigError(
                f"checkpoint.monitor={monitor}: validation logs {', '.join(measured) or 'nothing'}; monitor one of "
                f"these, or checkpoint.monitor=null"
            )
        score, sign = measured[monitor], -1 if self.plan.checkpoint.mode == "max" else 1
        if self.best_score is None or sign * score < sign * self.best_score:
            previous, self.best_score = self.best_path, score
            path = Path(self.plan.run_dir) / "checkpoints" / f"best-{trainer.global_step:08d}.ckpt"
            self.best_path = str(path)
            self._save(trainer, path)
            if previous is not None and previous != self.best_path:
                self._remove(trainer, Path(previous))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.plan.checkpoint.save_at_end and 0 < trainer.global_step != self.saved_step:
            self._save_step(trainer)

    def _save_step(self, trainer: Trainer) -> None:
        self.saved_step = trainer.global_step
        self._save(trainer, checkpoint_path(self.plan.run_dir, trainer.global_step))
        for old in list_checkpoints(self.plan.run_dir)[: -self.plan.checkpoint.keep_last]:
            self._remove(trainer, old)

    def _save(self, trainer: Trainer, path: Path) -> None:
        assert isinstance(trainer.strategy, PlannedStrategy)
        trainer.strategy.synchronize_buffers()
        trainer.save_checkpoint(path)

    def _remove(self, trainer: Trainer, path: Path) -> None:
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score, "best_path": self.best_path}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_score, self.best_path = state_dict["best_score"], state_dict["best_path"]
