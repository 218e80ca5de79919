"""Decides whether a step counts. Only StepVerdict writes the answer.

A step does not count if its loss or its gradients are not finite, if its loss is a spike and the Plan skips those, or
if the Plan passes its window over. Then the optimizer must change nothing. The device knows this in time, because the
norm of the gradients is not finite then. The host reads it some steps later.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from shardwise.checkpoint.state import persistent_buffers
from shardwise.distributed.mesh import Mesh, broadcast_from_rank_zero, mean_over
from shardwise.plan import Plan
from shardwise.protocols import optional


class StepVerdict:
    """Says whether the step that has just been made counts, and why not."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self.plan, self.mesh = plan, mesh
        self.step_skipped: bool | Tensor = False  # a tensor: so far only the device knows it
        self.skipped_by_scaler = False  # because the gradients overflowed
        self.skip_requested: Tensor | None = None  # whether the gradients were made non-finite on purpose
        self.skipped_steps = 0  # how many steps the loss scaler skipped in this process
        self._spikes = SpikeDetector(plan.guard.spike_z)
        self._one_as_loss: Tensor | None = None
        self._found_inf: Tensor | None = None  # the flag that fused optimizers read on the device

    def gradient_seed(self, loss: Tensor, window_start: int) -> Tensor:
        """The gradient from which the backward pass of a window's last micro-batch starts: 1, or NaN.

        It is NaN if the loss of the window is not finite, or if the step must not count. Then all gradients become NaN
        on every rank, and their norm shows it. Collective if spikes are skipped.

        `loss`: that of the window on this rank. `window_start`: the training clock when the window began.
        """
        if self._one_as_loss is None:
            self._one_as_loss = torch.ones_like(loss)
        seed = torch.add(self._one_as_loss, loss, alpha=0)
        self.skip_requested = None
        if self.plan.guard.on_spike == "skip":
            self.skip_requested = self._spikes.is_spike(mean_over(self.mesh.group("loss"), loss))
            seed = torch.where(self.skip_requested, torch.nan, seed)
        if window_start in self.plan.guard.pass_over:
            self.skip_requested = torch.ones((), dtype=torch.bool, device=seed.device)
            seed = seed * torch.nan
        return seed

    def take_request(self, skip: Tensor | None) -> None:
        """Take the request to skip of the rank that has made `gradient_seed`: of a pipeline's last stage."""
        asks = self.plan.guard.on_spike == "skip" or bool(self.plan.guard.pass_over)
        self.skip_requested = skip if asks else None

    def decide(self, skipped: bool) -> None:
        """Note the verdict where the host knows it already."""
        self.step_skipped = skipped

    def judge(self, gradient_norm: Tensor, optimizer: Optimizer) -> None:
        """Decide by the norm of the gradients over all ranks.

        Optimizers with a fused kernel read the verdict on the device. For all others the host waits for it. With
        on_nonfinite=stop, or after too many skipped steps in a row, all later steps are skipped too, so that nothing
        changes until the host has noticed.
        """
        guard = self.plan.guard
        may_go_on = guard.on_nonfinite == "skip" or guard.on_spike == "skip" or bool(guard.pass_over)
        if self._found_inf is None:
            self._found_inf = torch.zeros((), device=gradient_norm.device)
            self._one = torch.ones_like(self._found_inf)
            self._stopped, self._in_a_row = torch.zeros_like(self._found_inf), torch.zeros_like(self._found_inf)
        elif may_go_on:
            self._found_inf.copy_(self._stopped)
        # This one kernel sets the flag if the norm is not finite, and never clears it.
        torch._amp_foreach_non_finite_check_and_unscale_([gradient_norm.float()], self._found_inf, self._one)
        if may_go_on:  # up to `max_in_a_row` times
            self._in_a_row = (self._in_a_row + 1) * self._found_inf
            stopped = self._in_a_row > guard.max_in_a_row
            if guard.on_nonfinite == "stop":
                found = self._found_inf > 0
                stopped |= found if self.skip_requested is None else found & ~self.skip_requested
            self._stopped = torch.maximum(self._stopped, stopped.float())
        # A fused SGD that has no state yet would read its momentum from uninitialised memory.
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        reads = fused or bool(optional(optimizer, "reads_found_inf"))
        if reads and optimizer.state:
            optimizer.found_inf = self._found_inf  # type: ignore[attr-defined]
            self.step_skipped = self._found_inf
        else:
            self.step_skipped = bool(self._found_inf.item())

    def find_scaler_skip(self, loss: Tensor) -> bool:
        """Whether the step was skipped because the loss scale was too large: the loss is finite, its gradients are not.

        Such a step is not counted as a step. Collective if the step was skipped under loss scaling.

        `loss`: that of the window on this rank.
        """
        self.skipped_by_scaler = (
            self.step_skipped is True
            and self.plan.precision.loss_scaling
            and math.isfinite(mean_over(self.mesh.group("loss"), loss).item())
            and not (self.skip_requested is not None and bool(self.skip_requested.item()))
        )
        if self.skipped_by_scaler:
            self.step_skipped = False
            self.skipped_steps += 1
        return self.skipped_by_scaler

    def count_skipped_by_hand(self, steps: int) -> None:
        """Count `steps` that the loss scaler has skipped in a module that optimizes by hand."""
        self.skipped_steps += steps

    def clear_request(self) -> None:
        """Forget the request to skip, since the step has been recorded."""
        self.skip_requested = None


# Finds spikes of the loss, by its robust z-score among the losses before it.

# A loss is compared with up to SPIKE_WINDOW losses before it, and not before there are SPIKE_MINIMUM of them.
SPIKE_WINDOW, SPIKE_MINIMUM = 128, 32


def robust_z_of(loss: float, before: Collection[float]) -> float:
    """Compute `robust_z` on the host, where tensors would take longer than the arithmetic."""
    finite = math.isfinite(sum(before))
    losses = sorted(before if finite else [value if math.isfinite(value) else math.inf for value in before])
    middle = (len(losses) - 1) // 2
    median = losses[middle]
    if math.isinf(median):
        return math.nan
    deviation = sorted([abs(value - median) for value in losses])[middle]
    return (loss - median) / max(1.4826 * deviation, 1e-3 * abs(median), 1e-30)


def robust_z(loss: Tensor, before: Tensor) -> Tensor:
    """How many standard deviations `loss` lies above the median of the losses `before` it.

    The standard deviation is estimated from the median absolute deviation, which outliers do not move. A loss that is
    not finite counts as larger than every other.
    """
    before = before.nan_to_num(nan=torch.inf)
    median = before.median()
    deviation = (before - median).abs().nan_to_num(nan=torch.inf).median()
    # The deviation is at least a thousandth of the loss, so that a tiny change is no spike.
    return (loss - median) / (1.4826 * deviation).clamp(min=1e-3 * median.abs())


class SpikeDetector:
    """Finds spikes on the device before the weights change, by the rule that the guard has on the host."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold  # robust standard deviations
        self._before: list[Tensor] = []  # the losses of the last steps

    def is_spike(self, loss: Tensor) -> Tensor:
        """Whether `loss`, the mean over all ranks, is a spike: a flag on the device. Remembers the loss."""
        before, self._before = self._before, [*self._before[1 - SPIKE_WINDOW :], loss]
        if len(before) < SPIKE_MINIMUM:
            return torch.zeros_like(loss, dtype=torch.bool)
        return loss.isfinite() & (robust_z(loss, torch.stack(before)) > self.threshold)


# The buffers that training writes to, such as the averages of a BatchNorm.


class BufferKeeper:
    """Copies a module's buffers before each window, so that a step that does not count leaves no trace in them."""

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        # For each dtype: the buffers, and their values before the window.
        self._before: list[tuple[list[Tensor], Tensor]] | None = None

    def keep(self) -> None:
        """Copy the buffers before a window begins."""
        if self._before is None:
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            if self.module.automatic_optimization:
                for _, buffer in persistent_buffers(self.module):
                    by_dtype.setdefault(buffer.dtype, []).append(buffer)
            self._before = [(buffers, torch.empty(0)) for buffers in by_dtype.values()]
        self._before = [(buffers, _in_one_row(buffers)) for buffers, _ in self._before]

    def put_back(self, step_skipped: bool | Tensor) -> None:
        """Restore the buffers if the step was skipped. If only the device knows that, the host does not wait for it."""
        if step_skipped is False or not self._before:
            return
        for buffers, values in self._before:
            if isinstance(step_skipped, Tensor):
                values = torch.where(step_skipped > 0, values, _in_one_row(buffers))
            parts = torch.split(values, [buffer.numel() for buffer in buffers])
            shaped = [part if buffer.ndim == 1 else part.view_as(buffer)
                      for part, buffer in zip(parts, buffers, strict=True)]  # fmt: skip
            with torch.no_grad():
                torch._foreach_copy_(buffers, shaped)

    def synchronize(self, group: dist.ProcessGroup) -> None:
        """Give every rank the buffers of rank 0, before an evaluation and before a save. Collective."""
        with torch.no_grad():
            broadcast_from_rank_zero(list(self.module.buffers()), group)


def _in_one_row(tensors: list[Tensor]) -> Tensor:
    """A model has hundreds of buffers, and most have one dimension: each call for one of them takes the host time."""
    return torch.cat([tensor if tensor.ndim == 1 else tensor.reshape(-1) for tensor in tensors])
