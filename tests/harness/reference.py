"""The plainest version: one process, the whole global batch at once, no Lightning, no shardwise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.3, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8),
}
WEIGHT_DECAY = 0.01  # of matrices: norms, biases and embeddings have none


def plain_loop(
    module: nn.Module,
    dataset: Sequence[dict[str, Tensor]],
    loss_sum: Callable[[Any, dict[str, Tensor]], tuple[Tensor, Tensor]],
    optimizer: str | Callable[[nn.Module], Any],
    steps: int,
    global_batch_size: int,
    clip: float | None,
    zeros: bool = True,
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Train a copy of `module` on consecutive global batches; final parameters, losses and gradient norms.

    `optimizer` is one of OPTIMIZERS, or makes one for the module: anything that has `step`.

    `loss_sum(module, batch)` gives the summed loss and what it sums over; their quotient is the loss. `zeros`: a
    trainable weight that takes no part in a step has a gradient of zero; else it has none, and is left alone.
    """
    module = copy.deepcopy(module)
    trainable = [p for p in module.parameters() if p.requires_grad]
    opt = OPTIMIZERS[optimizer](groups_of(module)) if isinstance(optimizer, str) else optimizer(module)
    losses, norms = [], []
    batches = len(dataset) // global_batch_size
    for step in range(steps):
        start = step % batches * global_batch_size
        rows = [dataset[i] for i in range(start, start + global_batch_size)]
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        for parameter in trainable:
            parameter.grad = torch.zeros_like(parameter) if zeros else None
        total, count = loss_sum(module, batch)
        loss = total / count
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trainable, float("inf") if clip is None else clip)
        opt.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return {name: p.detach().clone() for name, p in module.named_parameters()}, losses, norms


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Matrices that decay; norms, biases and embeddings that do not. A head tied to an embedding is one."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    decays = [p for p in trainable if p.ndim > 1 and id(p) not in embeddings]
    rest = [p for p in trainable if p.ndim < 2 or id(p) in embeddings]
    return [{"params": decays, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]


def update_deviation(start: dict[str, Tensor], ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Per tensor: norm of the difference of the two updates over the norm of the reference's update."""
    deviations = {}
    for name, before in start.items():
        update = (theirs[name] - before).double()
        deviations[name] = float((ours[name] - theirs[name]).double().norm() / update.norm())
    return deviations
