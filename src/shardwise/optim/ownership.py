"""What a module may bring itself: its optimizer and its data. Each has one owner, and somebody must own it."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule

from shardwise.errors import ConfigError
from shardwise.plan import Plan

_LOADERS = {"fit": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader",
            "predict": "predict_dataloader"}  # fmt: skip


def check_ownership(plan: Plan, module: Any) -> None:
    """`module`: a LightningModule, or its class. What a function will return is known when it has.

    Raises:
        ConfigError: two owners of the optimizer, none of it, or none of the data.
    """
    target = plan.module["_target_"]
    brings_optimizer = _defines(module, "configure_optimizers")
    if brings_optimizer and plan.optimizer is not None and not plan.optimizer_override:
        raise ConfigError(
            f"{target} has configure_optimizers, and optimizer={plan.optimizer.get('_target_')} is "
            f"given as well: use optimizer=none schedule=none, or optimizer_override=true to overrule the module"
        )
    if not brings_optimizer and plan.optimizer is None and plan.stage == "fit":
        raise ConfigError(f"{target} has no configure_optimizers, and optimizer is none: give optimizer=adamw")
    loader = _LOADERS[plan.stage]
    if plan.data is None and not _defines(module, loader):
        raise ConfigError(
            f"{target} has no {loader}, and no data is given: give data._target_=package.Data, a LightningDataModule, "
            f"or define {loader} in the module"
        )


def _defines(module: Any, name: str) -> bool:
    own = getattr(module, name, None)
    return own is not None and getattr(own, "__func__", own) is not getattr(LightningModule, name)
