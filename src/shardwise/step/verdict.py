"""Does this step count? One owner of the answer: nobody else writes it.

A step does not count if its loss or its gradients are not finite, if its loss leaps and the Plan skips such steps, or
if its window is one that the run was told to pass over. Then the optimizer must leave everything as it is. The device
knows that in time, by a norm of the gradients that is not finite; the host reads it some steps later.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.distributed.collectives import mean_over
from shardwise.distributed.mesh import Mesh
from shardwise.plan import Plan
from shardwise.step.spikes import SpikeDetector


class StepVerdict:
    """Of the step that has just been made."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self.plan, self.mesh = plan, mesh
        self.step_skipped: bool | Tensor = False  # the optimizer changed nothing; a tensor: only the device knows yet
        self.skipped_by_scaler = False  # the gradients overflowed at this loss scale
        self.skip_requested: Tensor | None = None  # true: the gradients were made non-finite on purpose
        self.skipped_steps = 0  # by the loss scaler, in this process
        self._spikes = SpikeDetector(plan.guard.spike_z)
        self._one_as_loss: Tensor | None = None
        self._found_inf: Tensor | None = None  # what fused optimizers look at, on the device

    def gradient_seed(self, loss: Tensor, window_start: int) -> Tensor:
        """What the backward pass of a window's last micro-batch starts from: 1, or not a number if the window's loss
        is none, or if the step is not to count. So are its gradients then, of every parameter on every rank, and one
        look at their norm tells all. Collective where spikes are skipped.

        `loss`: the window's, on this rank. `window_start`: the training clock at its begin.
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

    def decide(self, skipped: bool) -> None:
        """The host knows it already."""
        self.step_skipped = skipped

    def judge(self, gradient_norm: Tensor, optimizer: Optimizer) -> None:
        """By the norm of the gradients over all ranks.

        Optimizers with a fused kernel read the verdict on the device. For the others the host waits, and knows. Under
        on_nonfinite=stop, or after too many in a row, it holds for every step from there on: until the host has
        noticed, nothing changes.
        """
        guard = self.plan.guard
        may_go_on = guard.on_nonfinite == "skip" or guard.on_spike == "skip" or bool(guard.pass_over)
        if self._found_inf is None:
            self._found_inf = torch.zeros((), device=gradient_norm.device)
            self._one = torch.ones_like(self._found_inf)
            self._stopped, self._in_a_row = torch.zeros_like(self._found_inf), torch.zeros_like(self._found_inf)
        elif may_go_on:
            self._found_inf.copy_(self._stopped)
        # One kernel: sets the flag, and never clears it.
        torch._amp_foreach_non_finite_check_and_unscale_([gradient_norm.float()], self._found_inf, self._one)
        if may_go_on:  # but not for ever
            self._in_a_row = (self._in_a_row + 1) * self._found_inf
            stopped = self._in_a_row > guard.max_in_a_row
            if guard.on_nonfinite == "stop":
                wanted = self._found_inf > 0
                stopped |= wanted if self.skip_requested is None else wanted & ~self.skip_requested
            self._stopped = torch.maximum(self._stopped, stopped.float())
        # Without state yet, a fused SGD would take what lies in memory for its momentum.
        if getattr(optimizer, "_step_supports_amp_scaling", False) and optimizer.state:
            optimizer.found_inf = self._found_inf  # type: ignore[attr-defined]
            self.step_skipped = self._found_inf
        else:
            self.step_skipped = bool(self._found_inf.item())

    def find_scaler_skip(self, loss: Tensor) -> bool:
        """Whether the step was skipped because the loss scale was too large: its gradients are not finite, of a loss
        that is. Then it is no step at all. Collective where the step was skipped under loss scaling.

        `loss`: the window's, on this rank.
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
        """Steps of a module that optimizes by hand, which the loss scaler has skipped."""
        self.skipped_steps += steps

    def clear_request(self) -> None:
        """The step has been recorded."""
        self.skip_requested = None
