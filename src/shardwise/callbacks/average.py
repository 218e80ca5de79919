"""An exponential moving average of the weights (`ema_decay=`): each rank averages what it holds."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from shardwise.plan import Plan
from shardwise.strategies.common import strategy_of


class WeightAverage(Callback):
    """Updated after every step that changed the weights; evaluation sees the average, training never does.

    The average stands in every checkpoint beside the weights that training goes on with: the strategy saves and loads
    it as `average`.
    """

    def __init__(self, plan: Plan) -> None:
        assert plan.ema_decay is not None
        self.plan, self.decay = plan, plan.ema_decay
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = strategy_of(trainer)
        if strategy.average is None:
            strategy.average = {name: shard.clone() for name, shard in strategy.master_shards().items()}
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:  # within a window, or a step that was skipped
            return
        self._step = trainer.global_step
        strategy = strategy_of(trainer)
        if not pl_module.automatic_optimization and not strategy.stepped:
            return
        masters = strategy.master_shards()
        assert strategy.average is not None
        if masters:  # a rank may hold nothing of a small model
            averages = [strategy.average[name] for name in masters]
            passed_over = strategy.planned_precision.passed_over
            if isinstance(passed_over, Tensor):  # only the device knows yet
                moves = torch._foreach_sub(list(masters.values()), averages)
                torch._foreach_mul_(moves, (1 - self.decay) * (1 - passed_over))
                torch._foreach_add_(averages, moves)
            elif not passed_over:
                torch._foreach_lerp_(averages, list(masters.values()), 1 - self.decay)

    def _swap(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exchange weights and average, in place."""
        strategy = strategy_of(trainer)
        if strategy.average is None:
            return
        strategy.planned_precision.let_copies_end()
        for name, shard in strategy.master_shards().items():
            held = shard.clone()
            shard.copy_(strategy.average[name])
            strategy.average[name].copy_(held)
        strategy.masters_changed()

    on_validation_start = on_test_start = on_predict_start = _swap
    on_validation_end = on_test_end = on_predict_end = _swap
