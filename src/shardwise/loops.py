"""Lightning's Trainer and its loop over batches, where they have to count in whole accumulation windows."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop


class WindowLoop(_TrainingEpochLoop):
    """An early stop, and the validation that comes with it, wait for the end of the accumulation window."""

    @property
    def done(self) -> bool:
        if self.trainer.should_stop and self._should_accumulate():
            return self._is_training_done and self._is_validation_done
        return super().done

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        return not self._should_accumulate() and super()._should_check_val_fx(data_fetcher)


class StoppableTrainer(Trainer):
    """Remembers who set `should_stop`: a callback or the module."""

    _should_stop = False
    _stopper: Any = None

    @property
    def should_stop(self) -> bool:
        return self._should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value and not self._should_stop:
            self._stopper = sys._getframe(1).f_locals.get("self")
        self._should_stop = bool(value)


def early_stop(trainer: Trainer) -> dict[str, Any] | None:
    """At which step training stopped before its planned end, who stopped it and why; None where it did not."""
    if not isinstance(trainer, StoppableTrainer) or not trainer.should_stop or trainer._stopper is None:
        return None
    who = trainer._stopper
    reason = getattr(who, "stopping_reason_message", None)  # EarlyStopping's
    name = type(who).__name__
    return {
        "step": trainer.global_step,
        "by": name if isinstance(who, (Callback, LightningModule)) else f"should_stop, set in {name}",
        "reason": None if reason is None else " ".join(reason.removesuffix("Signaling Trainer to stop.").split()),
    }
