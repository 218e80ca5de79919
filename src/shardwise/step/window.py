"""An accumulation window turns the micro-batches of one step into the gradient of the mean over the global batch.

The loader knows the weight of a whole window before its first micro-batch is computed (see data/loaders.py). So each
loss can be scaled before its backward pass. Later would be too late, since DeepSpeed clips inside its step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.distributed.dtensor import local_part
from shardwise.errors import ConfigError


class AccumulationWindow:
    """The losses of the current step's micro-batches on this rank."""

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self.losses: list[
            Tensor
        ] = []  # what each micro-batch adds to the loss of the window: shares, not the losses of training_step
        self._factor: Tensor | None = None  # the factor for the current micro-batch's loss

    def begin(self) -> None:
        self.losses = []

    def begin_micro_batch(self, scale: Tensor | None) -> None:
        """Begin the next micro-batch. `scale`: the factor of its loss; None: the loss is used as it is."""
        self._factor = scale

    @property
    def factor(self) -> Tensor | None:
        """The factor of the current micro-batch's loss: in proportion to what the micro-batch counts on this rank."""
        return self._factor

    @property
    def is_complete(self) -> bool:
        """Whether every micro-batch has had its forward pass."""
        return len(self.losses) == self.micro_batches

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to differentiate: this micro-batch's share of the loss of the global batch.

        `loss`: of `training_step`, divided by the number of micro-batches already: Lightning does that.
        """
        scaled = share_of_loss(loss, self._factor)
        self.losses.append(scaled.detach().reshape(()))
        return scaled

    def take_loss_of_manual_step(self, output: Any) -> None:
        """Take the loss for the log and the guard from what a module that optimizes by hand returns."""
        loss = loss_of(output)
        self.losses = []
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self.losses = [local_part(loss).detach().reshape(()).float()]

    @property
    def loss(self) -> Tensor:
        """The sum of the scaled losses of this rank's micro-batches."""
        return torch.stack(self.losses).sum() if len(self.losses) > 1 else self.losses[0]


def share_of_loss(loss: Tensor, factor: Tensor | None) -> Tensor:
    """The loss times its factor. What counts nothing is 0, whatever it is: a mean over no targets is NaN."""
    if factor is None:
        return loss
    factor = factor.to(loss.dtype)
    return torch.where(factor > 0, loss * factor, 0.0)


def loss_of(output: Any) -> Any:
    """The loss in what `training_step` returns."""
    return output.get("loss") if isinstance(output, dict) else output


def check_output(output: Any, module_name: str, *, has_own_backward: bool) -> None:
    """Check what `training_step` of a module with automatic optimization has returned.

    Raises:
        ConfigError: no loss, or one that does not depend on the weights.
    """
    if output is None:
        raise ConfigError(
            f"{module_name}.training_step returned None: every micro-batch needs a loss, "
            f"since the others of its step are weighed with it; return a loss of zero that depends on the weights"
        )
    loss = loss_of(output)
    if not has_own_backward and isinstance(loss, Tensor) and not loss.requires_grad:
        raise ConfigError(
            f"{module_name}.training_step returned a loss that has no gradient: it does not depend on the "
            f"parameters that are trained; look for detach(), torch.no_grad() or a new tensor made of its value, "
            f"or for parameters that are all frozen"
        )
