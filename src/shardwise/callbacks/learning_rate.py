"""Finds a learning rate to start with, by a hundred steps with ever larger rates (`find_learning_rate=true`).

The rates and the smoothed losses are those of Lightning's `Tuner.lr_find` (lightning 2.6, tuner/lr_finder.py), after
Smith, "Cyclical Learning Rates for Training Neural Networks" (2017). The suggestion is fastai's `valley` (fastai 2.7,
callback/schedule.py): the steepest slope, which Lightning takes, is often that of noise at the smallest rates.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from shardwise.errors import ConfigError, class_name
from shardwise.plan import Plan
from shardwise.plan.plan import FINDER_STEPS
from shardwise.run_dir.files import LEARNING_RATES, LEARNING_RATES_PICTURE

LOWEST, HIGHEST = 1e-8, 1.0
_SMOOTHING = 0.98
_DIVERGED = 4.0  # training diverges when the loss is this many times the smallest so far
_FEWEST = 10  # a fall of the loss has at least this many points


def rate_of(step: int) -> float:
    """The learning rate of a step, counted from 1."""
    share = step / FINDER_STEPS if step > 1 else 0.0
    return float(LOWEST * (HIGHEST / LOWEST) ** share)


class FindLearningRate(Callback):
    """Sets the rate of every step, stops when the loss diverges, and writes learning_rate.csv and a picture."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.losses: list[float] = []  # the smoothed loss of each step
        self._average, self._best = 0.0, 0.0
        self._window: list[Tensor] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise ConfigError(
                f"find_learning_rate=true: {class_name(pl_module)} optimizes by hand, and which rate belongs to its "
                f"loss is not known; try rates by a sweep, e.g. -m module.lr=1e-4,1e-3"
            )
        trainer.strategy.lr_scheduler_configs = []  # schedules would set other rates

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        rate = rate_of(len(self.losses) + 1)
        for group in trainer.optimizers[0].param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self._window.append(loss.detach().float())  # it is divided already by the number of micro-batches of the step
        if len(self._window) < self.plan.accumulate_grad_batches:
            return
        mean = trainer.strategy.reduce(torch.stack(self._window).sum(), reduce_op="mean")
        self._window.clear()
        if self.add_loss(float(mean)):
            trainer.should_stop = True

    def add_loss(self, loss: float) -> bool:
        """Add a step's loss, the mean over ranks and micro-batches. Returns whether it shows that training diverges."""
        step = len(self.losses) + 1
        self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * loss
        smooth = self._average / (1 - _SMOOTHING ** (step + 1))
        diverges = not math.isfinite(loss) or (step > 1 and smooth > _DIVERGED * self._best)
        if step == 1 or smooth < self._best:
            self._best = smooth
        self.losses.append(smooth)
        return diverges

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        rates = [rate_of(step) for step in range(1, len(self.losses) + 1)]
        folder = Path(self.plan.run_dir)
        with (folder / LEARNING_RATES).open("w", newline="") as file:
            csv.writer(file).writerows([("learning_rate", "loss"), *zip(rates, self.losses, strict=True)])
        found = suggest(rates, self.losses)
        picture = folder / LEARNING_RATES_PICTURE
        plot(rates, self.losses, found, picture)
        if found is None:
            print(f"learning rate: the loss does not fall, so none is suggested: {picture}", flush=True)
            return
        word = "optimizer.lr" if self.plan.optimizer is not None else "the module's own learning rate"
        print(
            f"learning rate: the loss falls around {found:.2g}; start with {word}={found:.2g}\n"
            f"  losses of {LOWEST:g} to {rates[-1]:.2g}: {picture}, learning_rate.csv",
            flush=True,
        )


def suggest(rates: list[float], losses: list[float]) -> float | None:
    """The rate in the middle of the longest fall of the smoothed loss; None: no fall is long enough."""
    longest = [1] * len(losses)  # the length of the longest falling sequence that ends at each point, gaps left out
    for i, loss in enumerate(losses):
        longest[i] += max((longest[j] for j in range(i) if loss < losses[j]), default=0)
    if max(longest, default=0) < _FEWEST:
        return None
    end = longest.index(max(longest))
    return rates[max(end - max(longest), 0) + max(longest) // 2]


def plot(rates: list[float], losses: list[float], found: float | None, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    axes.plot(rates, losses)
    if found is not None:
        axes.axvline(found, linestyle="--", color="grey", label=f"suggested ({found:.2g})")
        axes.legend()
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss, smoothed", title=path.parent.name)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
