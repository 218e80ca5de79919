"""Checks that either the module or the config defines the optimizer, and the data."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule

from shardwise.errors import ConfigError
from shardwise.plan import Plan

_LOADERS = {"fit": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader",
            "predict": "predict_dataloader"}  # fmt: skip


def check_ownership(plan: Plan, module: Any) -> None:
    """Check who defines the optimizer and the data.

    `module`: a LightningModule, or its class. If the target is a function, only its result can be checked.

    Raises:
        ConfigError: both define an optimizer, neither defines one, or neither defines the data.
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
    method = getattr(module, name, None)
    return method is not None and getattr(method, "__func__", method) is not getattr(LightningModule, name)
