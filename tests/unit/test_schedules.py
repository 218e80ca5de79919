"""What Guard restores of schedules and optimizers when it stops a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from shardwise.callbacks.guard import restore_schedules, state_of_schedules


def test_all_options_of_an_optimizer_are_restored() -> None:
    """OneCycleLR also cycles the momentum, and a learning rate may be a tensor that is written in place."""
    for rate in (0.02, torch.tensor(0.02)):
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=rate, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8)
        trainer: Any = SimpleNamespace(
            optimizers=[optimizer], lr_scheduler_configs=[SimpleNamespace(scheduler=schedule)]
        )
        optimizer.step()
        schedule.step()
        options = {key: optimizer.param_groups[0][key] for key in ("lr", "momentum")}
        before = {key: float(value) for key, value in options.items()}
        state = state_of_schedules(trainer)
        optimizer.step()
        schedule.step()
        assert all(float(optimizer.param_groups[0][key]) != value for key, value in before.items())
        restore_schedules(trainer, state)
        assert {key: float(optimizer.param_groups[0][key]) for key in before} == before
        assert schedule.last_epoch == 1 and len(optimizer.param_groups[0]["params"]) == 2
