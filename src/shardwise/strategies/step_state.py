"""The optimizer step under way: its micro-batches, whether it counts, and what is recorded of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from shardwise.data.loaders import TrainLoader
from shardwise.distributed.mesh import Mesh
from shardwise.lightning_internals import loops
from shardwise.plan import Plan
from shardwise.step.precision_plugin import PlannedPrecision
from shardwise.step.record import StepRecord, StepRecorder
from shardwise.step.verdict import BufferKeeper, StepVerdict
from shardwise.step.window import AccumulationWindow
from shardwise.strategies.refusals import FrozenForGood


class StepState:
    """A part of every strategy. `take_window` comes before the set-up, where micro-batches of a step run together."""

    buffers: BufferKeeper  # from `set_up` on
    recorder: StepRecorder

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self.plan, self.mesh = plan, mesh
        self.window, self.verdict = AccumulationWindow(plan.accumulate_grad_batches), StepVerdict(plan, mesh)
        self.has_stepped = False  # whether an optimizer has, in this window; in this batch in manual optimization
        self.learning_rate = float("nan")  # that of the first parameter group in the last step
        self._frozen = FrozenForGood()
        self.before_first: Callable[[], None] = lambda: None  # called before the first batch

    def take_window(self, window: AccumulationWindow) -> None:
        self.window = window

    def call_before_first(self, work: Callable[[], None]) -> None:
        """Call `work` after the set-up and before the first batch."""
        self.before_first = work

    def freeze(self, frozen: FrozenForGood) -> None:
        """Refuse from now on that these weights are trained."""
        self._frozen = frozen

    def set_up(self, module: LightningModule, device: torch.device) -> None:
        self.buffers, self.recorder = BufferKeeper(module), StepRecorder(device, self.mesh)

    def begin_batch(self, batch_idx: int, scale: Tensor | None) -> None:
        """`scale`: what the loss of this micro-batch counts; None: as much as the others."""
        if batch_idx % self.plan.accumulate_grad_batches == 0:
            self.has_stepped = False
            self.window.begin()
            self.buffers.keep()
            self._frozen.check()
        self.window.begin_micro_batch(scale)

    def gradient_seed(self, loader: TrainLoader, like: Tensor) -> Tensor:
        """What the last backward pass of a step begins with. Collective: all ranks learn whether the step counts."""
        return self.verdict.gradient_seed(self.window.loss, loader.window_start).to(like.dtype).reshape(like.shape)

    def note_learning_rate(self, optimizer: Optimizer) -> None:
        self.learning_rate = float(optimizer.param_groups[0]["lr"])

    def note_step(self, *_: Any) -> None:
        """Called behind an optimizer's step."""
        self.has_stepped = True

    def end(self, trainer: Trainer, precision: PlannedPrecision) -> str | None:
        """Decide whether the step that has ended counts. Returns a line for the user, if the loss scaler skipped it."""
        said = None
        if self.verdict.find_scaler_skip(self.window.loss):
            number, scale = trainer.global_step + 1, precision.loss_scale
            said = f"step {number} skipped: its gradients are not finite; the loss scale is {scale:g} now"
            loops.uncount_step(trainer)
        self.buffers.put_back(self.verdict.step_skipped)
        return said

    def rewind(self, trainer: Trainer, loader: TrainLoader, steps: int) -> bool:
        """Set counters and training clock back by `steps` that have changed no weight.

        Returns whether that was done. Steps of an earlier epoch are not taken back.
        """
        if not loops.rewind(trainer, steps, steps * self.plan.accumulate_grad_batches):
            return False
        loader.rewind(steps)
        return True

    def synchronize_buffers(self) -> None:
        """Let every rank that has these layers have the same buffers. Collective."""
        self.buffers.synchronize(self.mesh.group("stage"))

    def record(self, number: int, loader: TrainLoader, precision: PlannedPrecision, signal_requests: int) -> StepRecord:
        """Record the window that has just ended as step `number`. Collective; does not wait for the device.

        `signal_requests`: the requests that signals have made to this rank (see process/signals.py).
        """
        return self.recorder.finish(number, loader, self.window, precision, self.learning_rate, signal_requests)
