"""The plainest version: one process, the whole global batch at once, no Lightning, no shardwise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def plain_loop(
    module: nn.Module,
    dataset: Sequence[dict[str, Tensor]],
    loss_sum: Callable[[Any, dict[str, Tensor]], tuple[Tensor, Tensor]],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    steps: int,
    global_batch_size: int,
    clip: float | None,
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Train a copy of `module` on consecutive global batches; final parameters, losses and gradient norms.

    `loss_sum(module, batch)` gives the summed loss and what it sums over; their quotient is the loss.
    """
    module = copy.deepcopy(module)
    opt = optimizer(module)
    losses, norms = [], []
    batches = len(dataset) // global_batch_size
    for step in range(steps):
        start = step % batches * global_batch_size
        rows = [dataset[i] for i in range(start, start + global_batch_size)]
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        total, count = loss_sum(module, batch)
        loss = total / count
        opt.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        parameters = [p for p in module.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf") if clip is None else clip)
        opt.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return {name: p.detach().clone() for name, p in module.named_parameters()}, losses, norms


def update_deviation(start: dict[str, Tensor], ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Per tensor: norm of the difference of the two updates over the norm of the reference's update."""
    deviations = {}
    for name, before in start.items():
        update = (theirs[name] - before).double()
        deviations[name] = float((ours[name] - theirs[name]).double().norm() / update.norm())
    return deviations
