"""Checkpoints every N steps, the last K kept, the best by a metric kept as well."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.callbacks.steps import validation_metrics
from shardwise.checkpoints import checkpoint_path, list_checkpoints, step_of
from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.strategies.common import strategy_of


class Saving(Callback):
    """Rank 0 decides and removes; saving itself is collective.

    The best score stands in `best.json` beside its checkpoint, not in the checkpoints: those of the same step are
    written before validation has found it, and another run that goes on from one has a best of its own.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.folder = Path(plan.run_dir) / "checkpoints"
        self.best_score: float | None = None
        self.best_path: str | None = None
        self.saved_step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.plan.resume == str(checkpoint_path(self.plan.run_dir, trainer.global_step)):
            self.saved_step = trainer.global_step
        loop = trainer.fit_loop.epoch_loop
        if loop.restarting and loop.batch_progress.current.completed >= trainer.num_training_batches:
            # Saved after an epoch: Lightning would run one more micro-batch of it, and step on that alone.
            loop.restarting = False
        self.best_score, self.best_path = trainer.strategy.broadcast(self._read_best())
        if trainer.is_global_zero:
            for partial in self.folder.glob("*.partial"):
                _remove(partial)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = self.plan.checkpoint.save_every_n_steps
        step = trainer.global_step
        ends_window = (batch_idx + 1) % self.plan.accumulate_grad_batches == 0
        if (
            every and ends_window and step % every == 0 and 0 < step != self.saved_step
        ):  # saved: since, all were skipped
            self.save_step(trainer)

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
        # A metric that its module has not synchronised differs between ranks, and so would their verdicts.
        score: float = trainer.strategy.broadcast(measured[monitor])
        sign = -1 if self.plan.checkpoint.mode == "max" else 1
        if math.isnan(score) or (self.best_score is not None and sign * score >= sign * self.best_score):
            return
        previous, self.best_score = self.best_path, score
        path = self.folder / f"best-{trainer.global_step:08d}.ckpt"
        self.best_path = str(path)
        self._save(trainer, path)
        if trainer.is_global_zero:
            best = {"checkpoint": path.name, "monitor": monitor, "score": score}
            (self.folder / "best.json").write_text(json.dumps(best) + "\n")
            if previous is not None and previous != self.best_path:
                _remove(Path(previous))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.plan.checkpoint.save_at_end and 0 < trainer.global_step != self.saved_step:
            self.save_step(trainer)

    def save_step(self, trainer: Trainer) -> None:
        """Save the step that the counters show. Collective."""
        self.saved_step = trainer.global_step
        self._save(trainer, checkpoint_path(self.plan.run_dir, trainer.global_step))
        if trainer.is_global_zero:
            for old in list_checkpoints(self.plan.run_dir)[: -self.plan.checkpoint.keep_last]:
                _remove(old)

    def forget_after(self, trainer: Trainer, step: int) -> None:
        """Remove what was saved later: `resume=auto` would take it. Collective."""
        if trainer.is_global_zero:
            for path in list_checkpoints(self.plan.run_dir):
                if step_of(path) > step:
                    _remove(path)
        trainer.strategy.barrier()

    def _save(self, trainer: Trainer, path: Path) -> None:
        """Under another name until it is whole: what a kill leaves behind is never taken for a checkpoint."""
        strategy = strategy_of(trainer)
        strategy.synchronize_buffers()
        partial = path.with_name(path.name + ".partial")
        trainer.save_checkpoint(partial)  # all ranks have written theirs when it returns
        if trainer.is_global_zero:
            _remove(path)
            os.replace(partial, path)
        strategy.restart_clock()

    def _read_best(self) -> tuple[float | None, str | None]:
        try:
            best = json.loads((self.folder / "best.json").read_text())
        except (OSError, ValueError):
            return None, None
        path = self.folder / best["checkpoint"]
        if best["monitor"] != self.plan.checkpoint.monitor or not path.exists():
            return None, None
        return best["score"], str(path)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
