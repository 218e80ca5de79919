"""Applies the options that change a whole config: `quick_check=true` and `find_learning_rate=true`."""

from __future__ import annotations

import dataclasses

from shardwise.config.groups import CheckpointConfig, LoggerConfig, ProfileConfig
from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError
from shardwise.plan.plan import FINDER_STEPS

QUICK_BATCHES = 3  # how many batches of every stage each rank runs


def for_quick_check(config: RunConfig) -> RunConfig:
    """Change the config to a run of a few batches of every stage, which saves no checkpoint.

    Raises:
        ConfigError: a stage other than fit, or a run that is resumed.
    """
    if config.stage != "fit" or config.resume is not None:
        word = f"stage={config.stage}" if config.stage != "fit" else f"resume={config.resume}"
        raise ConfigError(f"quick_check=true tries a new run in all its stages: leave out {word}")
    return dataclasses.replace(
        config, max_steps=QUICK_BATCHES, max_epochs=None, max_samples=None, validate_every_n_steps=QUICK_BATCHES,
        validate_every_n_epochs=None,
        checkpoint=_unsaved(config.checkpoint), logger=LoggerConfig(), loggers={}, log_every_n_steps=1, max_restarts=0,
        profile=ProfileConfig(), profiler="none",
        name=None if config.name is None else f"{config.name}-quick-check",
    )  # fmt: skip


def _unsaved(checkpoint: CheckpointConfig) -> CheckpointConfig:
    return dataclasses.replace(
        checkpoint,
        save_every_n_steps=None,
        save_every_n_epochs=None,
        save_at_end=False,
        keep_every_n_steps=None,
    )


def for_learning_rate_finder(config: RunConfig) -> RunConfig:
    """Change the config to a hundred steps without schedule, validation and checkpoint, to find a learning rate.

    Raises:
        ConfigError: a stage other than fit, a run that is resumed, or a quick check.
    """
    if config.stage != "fit" or config.resume is not None or config.quick_check:
        word = "quick_check=true" if config.quick_check else f"resume={config.resume}"
        word = word if config.stage == "fit" else f"stage={config.stage}"
        raise ConfigError(f"find_learning_rate=true trains from the start with rates of its own: leave out {word}")
    guard = dataclasses.replace(config.guard, on_nonfinite="skip", on_spike="ignore", max_in_a_row=FINDER_STEPS)
    return dataclasses.replace(
        config, max_steps=FINDER_STEPS, max_epochs=None, max_samples=None, schedule=None, guard=guard,
        checkpoint=_unsaved(config.checkpoint), max_validation_batches=0, max_restarts=0,
        name=None if config.name is None else f"{config.name}-learning-rate",
    )  # fmt: skip
