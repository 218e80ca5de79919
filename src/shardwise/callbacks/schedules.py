"""Notes where the schedules and the optimizers' options stand, and restores it; refuses a schedule that ends before
the run does: see Guard."""

from __future__ import annotations

import math
from copy import copy
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

from shardwise.errors import ConfigError, class_name
from shardwise.plan import Plan


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


def check_schedules_last(trainer: Trainer, plan: Plan) -> None:
    """Refuse a OneCycleLR whose `total_steps` are over before the run is: torch raises in the step that comes next.

    A checkpoint brings the `total_steps` that the run had before.

    Raises:
        ConfigError
    """
    module = trainer.lightning_module
    if not module.automatic_optimization or type(module).lr_scheduler_step is not LightningModule.lr_scheduler_step:
        return  # the module itself decides when a schedule moves on
    if trainer.early_stopping_callbacks:
        return  # the run may end before the schedule does
    for config in trainer.lr_scheduler_configs:
        schedule = config.scheduler
        if type(schedule) is not OneCycleLR:
            continue
        end = trainer.estimated_stepping_batches  # -1 or infinite where no data say it
        last = _last_step(trainer, plan, config)
        if last is None or last >= end or end == float("inf"):
            continue
        lasts = f"OneCycleLR with total_steps={schedule.total_steps} lasts to step {last}, and this run to step {end}"
        give = f"give max_steps={last}" + (" max_epochs=null" if plan.max_steps is None else "")
        if plan.resume is None:
            raise ConfigError(
                f"{class_name(module)}.configure_optimizers: {lasts}; {give}, or "
                f"total_steps=self.trainer.estimated_stepping_batches there"
            )
        raise ConfigError(
            f"resume={plan.resume}: the checkpoint's {lasts}; {give}, with which it ends as it was to end, or begin a "
            f"new run, with a new schedule, from its weights: shardwise export {plan.resume} format=safetensors, then "
            f"init_from= and another name="
        )


def _last_step(trainer: Trainer, plan: Plan, config: Any) -> int | None:
    """The last step at which the run may end, since the next would move the schedule on once too often.

    None: it is not known beforehand; see WindowLoop.update_lr_schedulers.
    """
    left, frequency, batches = config.scheduler.total_steps - config.scheduler.last_epoch, config.frequency, 0
    if config.interval == "step":
        return int((trainer.global_step // frequency + left + 1) * frequency - 1)
    if plan.resume is None and trainer.num_training_batches != float("inf"):
        batches = int(trainer.num_training_batches)  # of an epoch
    return int((left + 1) * frequency * math.ceil(batches / plan.accumulate_grad_batches)) - 1 if batches else None
