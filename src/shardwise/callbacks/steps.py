"""The step's own numbers: logged, and shown as a progress bar in a terminal or as lines elsewhere."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from tqdm import tqdm

from shardwise.loggers import CsvLogger
from shardwise.plan import Plan
from shardwise.strategies.common import PlannedStrategy

_HANDFUL = 5  # compilations after the first step that pass without a word


class StepLog(Callback):
    """Logs `train/loss` (mean over the global batch), the gradient norm, learning rate, position and speed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.bar: tqdm[Any] | None = None
        self.seconds = 0.0  # spent in steps since this process started, validation and saving left out
        self.tokens = 0  # summed loss weights of all ranks since this process started
        self.steps = 0
        self.graphs = 0  # compiled so far
        self.recompiled = 0  # of these, after the first step
        self._evaluated = False
        self._last_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, CsvLogger):
                logger.rewind(trainer.global_step)
        self._last_step = trainer.global_step
        self._since = time.monotonic()
        self._marked = (0.0, 0, trainer.global_step)
        if trainer.is_global_zero and self.plan.progress_bar:
            total = None if trainer.max_steps < 0 else trainer.max_steps
            self.bar = tqdm(total=total, initial=trainer.global_step, unit="step", dynamic_ncols=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.plan.accumulate_grad_batches:
            return
        step = trainer.global_step
        if step == self._last_step:  # skipped: the row of the one before stands
            return
        self._last_step = step
        self.steps += 1
        if self.bar is not None:
            self.bar.n = step
            self.bar.update(0)
        if self.plan.compile != "none":
            self._count_graphs(trainer)
        if self.plan.logs(step):
            self._log(trainer, pl_module, step)

    def _count_graphs(self, trainer: Trainer) -> None:
        """Graphs that are compiled once training is under way: the first step, and what evaluation needs, are not."""
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        self.graphs, before = graphs, self.graphs
        if self.steps > 1 and graphs > before and not self._evaluated:
            self.recompiled += graphs - before
            if self.recompiled > _HANDFUL >= self.recompiled - (graphs - before) and trainer.is_global_zero:
                warnings.warn(
                    f"compile={self.plan.compile}: {self.recompiled} graphs were compiled after the first step, each "
                    f"in seconds: something changes from step to step (shapes, flags); TORCH_LOGS=recompiles "
                    f"names it, compile=none avoids it",
                    stacklevel=2,
                )
        self._evaluated = False

    def leave_out(self, seconds: float) -> None:
        """These were spent on something else than steps."""
        self._since += seconds

    def _log(self, trainer: Trainer, module: LightningModule, step: int) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, PlannedStrategy)
        assert strategy.train_loader is not None
        metrics = {"train/samples": float(strategy.train_loader.consumed)}
        if module.automatic_optimization:
            metrics["train/loss"] = strategy.step_loss()
            norm = strategy.planned_precision.gradient_norm
            assert norm is not None
            metrics["train/gradient_norm"] = norm.item()
        if strategy.planned_precision.loss_scale is not None:
            metrics["train/loss_scale"] = strategy.planned_precision.loss_scale
            metrics["train/skipped_steps"] = float(strategy.skipped_steps)
        metrics["train/learning_rate"] = strategy.learning_rate
        self.tokens = self._all_ranks(strategy, strategy.train_loader.weights)
        now = self.seconds + time.monotonic() - self._since
        seconds, tokens, since = self._marked
        rate = (step - since) / max(now - seconds, 1e-9)
        metrics["train/samples_per_second"] = rate * self.plan.global_batch_size
        if self.tokens:
            metrics[f"train/{weight_unit(module)}_per_second"] = (self.tokens - tokens) / max(now - seconds, 1e-9)
        self._marked = (now, self.tokens, step)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step)
        self._show(trainer, step, metrics)

    def _all_ranks(self, strategy: PlannedStrategy, value: int) -> int:
        total = torch.tensor(value, dtype=torch.int64, device=strategy.root_device)
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return int(total.item())

    def _show(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        if not trainer.is_global_zero:
            return
        shown = {"loss": "train/loss", "gradient norm": "train/gradient_norm", "learning rate": "train/learning_rate"}
        words = {word: f"{metrics[key]:.4g}" for word, key in shown.items() if key in metrics}
        speeds = {key.removeprefix("train/"): value for key, value in metrics.items() if key.endswith("_per_second")}
        name, speed = list(speeds.items())[-1]
        words[name.replace("_per_second", "/s")] = f"{speed:,.0f}"
        if self.bar is not None:
            self.bar.set_postfix(words)
        else:
            of = "" if trainer.max_steps < 0 else f"/{trainer.max_steps}"
            print(f"step {step}{of}  " + "  ".join(f"{k} {v}" for k, v in words.items()), flush=True)

    # Validation is logged under the step that it follows: Lightning counts the step only afterwards

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self.seconds += time.monotonic() - self._since
            trainer.fit_loop.epoch_loop._batches_that_stepped += 1

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        trainer.fit_loop.epoch_loop._batches_that_stepped -= 1
        self._evaluated = True
        self._since = time.monotonic()
        if trainer.is_global_zero and (measured := validation_metrics(trainer)):
            line = f"step {trainer.global_step}  " + "  ".join(f"{key} {value:.4f}" for key, value in measured.items())
            tqdm.write(line) if self.bar is not None else print(line, flush=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds += time.monotonic() - self._since
        if self.bar is not None:
            self.bar.close()


def validation_metrics(trainer: Trainer) -> dict[str, float]:
    """Scalars of the last evaluation."""
    return {
        key: float(value)
        for key, value in trainer.callback_metrics.items()
        if value.numel() == 1 and not key.startswith("train/")
    }


def weight_unit(module: LightningModule) -> str:
    """What `loss_weight` counts, e.g. tokens; named by the module."""
    return str(getattr(module, "loss_weight_unit", "weights"))
