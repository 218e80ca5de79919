"""Keeps an exponential moving average of the weights (`ema_decay=`): each rank averages the parts that it holds."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from shardwise.plan import Plan
from shardwise.strategies.base import strategy_of


class WeightAverage(Callback):
    """Updates the average after every step that changed the weights. Evaluation uses it, training never does.

    Every checkpoint holds the average beside the weights that training goes on with: the strategy saves and loads it
    as `average`.
    """

    def __init__(self, plan: Plan) -> None:
        assert plan.ema_decay is not None
        self.plan, self.decay = plan, plan.ema_decay
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = strategy_of(trainer)
        strategy.sharded.begin_average()
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:  # the window has not ended, or its step was skipped
            return
        self._step = trainer.global_step
        strategy = strategy_of(trainer)
        if not pl_module.automatic_optimization and not strategy.step.has_stepped:
            return
        sharded, skipped = strategy.sharded, strategy.step.verdict.step_skipped
        assert sharded.average is not None
        masters = sharded.averaged_shards()
        if masters:  # a rank may hold no part of a small model
            averages = [sharded.average[name] for name in masters]
            if isinstance(skipped, Tensor):  # only the device knows yet whether the step is skipped
                moves = torch._foreach_sub(list(masters.values()), averages)
                torch._foreach_mul_(moves, (1 - self.decay) * (1 - skipped))
                torch._foreach_add_(averages, moves)
            elif not skipped:
                torch._foreach_lerp_(averages, list(masters.values()), 1 - self.decay)

    def _swap(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exchange the weights and the average."""
        strategy = strategy_of(trainer)
        if strategy.sharded.average is not None:
            strategy.exchange_average()

    on_validation_start = on_test_start = on_predict_start = _swap
    on_validation_end = on_test_end = on_predict_end = _swap
