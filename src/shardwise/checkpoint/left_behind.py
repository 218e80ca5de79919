"""A run with another optimizer, which by `resume_allow=[optimizer]` may leave its checkpoint's state behind."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shardwise.checkpoint.optimizer_groups import fill_names, optimizer_difference
from shardwise.checkpoint.state import ShardedState
from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.run_dir.resume import changes_optimizer


def takes_optimizers(plan: Plan, state: ShardedState, saved: list[dict[str, Any]]) -> bool:
    """Whether this run's optimizers can use the saved state. Prints so where that state is left behind.

    Raises:
        ConfigError: they cannot, and `resume_allow` does not name the optimizer.
    """
    names = state.group_names()
    fill_names(saved, names)
    difference = optimizer_difference(saved, state.module_optimizers(), names)
    if difference is not None and "optimizer" not in plan.resume_allow:
        raise ConfigError(f"resume={plan.resume}: {difference}; resume_allow=[optimizer] leaves that state behind")
    if difference is not None and dist.get_rank() == 0:
        print(
            f"the checkpoint's optimizer: {difference}; that state is left behind, and this run's learning rate holds",
            flush=True,
        )
    return difference is None


def tell_kept(plan: Plan, optimizers: Sequence[Optimizer]) -> None:
    """Say that the saved state is used, where the user may think otherwise. Call it when the state is restored."""
    if dist.get_rank() != 0:
        return
    without = _without_effect(plan, [group for one in optimizers for group in one.param_groups])
    if not (without or "optimizer" in plan.resume_allow or changes_optimizer(plan)):
        return
    line = "the checkpoint's optimizer state, its learning rate included, is kept"
    if without:
        line += (
            f": {' and '.join(without)} {'have' if len(without) > 1 else 'has'} no effect; a new run from its weights "
            f"takes such values: shardwise export {plan.resume} format=safetensors, then init_from= and another name="
        )
    print(line, flush=True)


def tell_left_callbacks(saved: Mapping[str, Any], trainer: Trainer) -> None:
    """Name the callbacks of which the checkpoint has the state, and which this run does not have as they were."""
    left = sorted(map(str, saved.keys() - {callback.state_key for callback in trainer.callbacks}))  # type: ignore[attr-defined]
    if left and dist.get_rank() == 0:
        print(
            f"the checkpoint has the state of {', '.join(left)}, which this run has not, or with other values: that "
            f"state is left behind",
            flush=True,
        )


def _without_effect(plan: Plan, groups: list[dict[str, Any]]) -> list[str]:
    """The values of `optimizer.*` that no group of the optimizer has, each with the one that holds."""
    found = []
    for key, given in (plan.optimizer or {}).items():
        kept = "initial_lr" if key == "lr" and plan.schedule is not None else key  # the schedule's highest rate
        held = [_plain(group[kept]) for group in groups if kept in group]
        if held and not any(_are_alike(value, given) for value in held):
            found.append(f"optimizer.{key}={json.dumps(given)} (it is {json.dumps(held[0])})")
    return found


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
    return list(value) if isinstance(value, tuple) else value


def _are_alike(value: Any, given: Any) -> bool:
    numbers = isinstance(value, (int, float)) and isinstance(given, (int, float))
    return value == given or (numbers and math.isclose(value, given, rel_tol=1e-6))  # a rate may be kept in fp32


def moved_on(configs: Sequence[LRSchedulerConfig], saved: Sequence[Any]) -> list[Any]:
    """Move this run's schedules on by as many steps as the `saved` ones had made, and return their states.

    So each group of this run's optimizer has the rate of that step. The saved states cannot be used: they hold the
    rates of another optimizer, one for each of its groups. A schedule that follows a metric, or that is not torch's,
    begins anew.
    """
    for config, state in zip(configs, saved, strict=False):
        scheduler = config.scheduler
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            continue
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # before the optimizer's first
            for _ in range(_steps(state)):
                scheduler.step()
    return [config.scheduler.state_dict() for config in configs]


def _steps(state: dict[str, Any]) -> int:
    """How many steps a schedule had made; a ChainedScheduler does not know it itself."""
    if "last_epoch" in state:
        return int(state["last_epoch"])
    chained = [one for value in state.values() if isinstance(value, list) for one in value if isinstance(one, dict)]
    return max(map(_steps, chained), default=0)
