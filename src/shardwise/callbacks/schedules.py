"""Notes where the schedules and the optimizers' options stand, and restores it: see Guard."""

from __future__ import annotations

from copy import copy
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor


def state_of_schedules(trainer: Trainer) -> Any:
    """The states of the schedules, and the options of the optimizers: a schedule may change a momentum, too."""
    states = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    return states, [[_options(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else copy(value) for key, value in group.items()
            if key != "params"}  # fmt: skip


def restore_schedules(trainer: Trainer, schedules: Any) -> None:
    states, options = schedules
    for config, state in zip(trainer.lr_scheduler_configs, states, strict=True):
        config.scheduler.load_state_dict(state)
    for optimizer, saved in zip(trainer.optimizers, options, strict=True):
        for group, group_options in zip(optimizer.param_groups, saved, strict=True):
            group.update(group_options)
