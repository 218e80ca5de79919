"""Where metrics go: metrics.csv always, W&B or TensorBoard when asked. The one module that knows wandb."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger

from shardwise.config.targets import build, check, locate
from shardwise.errors import ConfigError
from shardwise.metrics.csv_logger import CsvLogger
from shardwise.metrics.wandb_logger import build_wandb_logger
from shardwise.plan import Plan
from shardwise.run_dir.checkpoints import step_of


def check_loggers(plan: Plan) -> None:
    """Locate the user's own trackers and bind their arguments, building nothing.

    Raises:
        ConfigError: a target that is no Logger class, or an argument that it does not take.
    """
    for name, node in plan.loggers.items():
        where = f"loggers.{name}"
        target = locate(node["_target_"], where)
        if not (isinstance(target, type) and issubclass(target, Logger)):
            raise ConfigError(
                f"{where}._target_={node['_target_']} is no logger class: give a subclass of "
                f"lightning.pytorch.loggers.Logger"
            )
        check(node, where)


def build_loggers(plan: Plan, record: dict[str, Any]) -> list[Logger]:
    """Trackers first, for a module's `self.logger`: that of `logger=`, then the user's own; metrics.csv is the last.

    What is logged in another stage than fit goes into files and runs of its own, beside the run's curves.
    `record`: Plan and environment, kept with the run.
    """
    if plan.quick_check:  # what the module asks of a tracker is answered with nothing
        return [DummyLogger(), CsvLogger(plan.run_dir, plan.stage)]
    trackers: list[Logger] = []
    if plan.logger.name == "tensorboard":
        try:
            from lightning.pytorch.loggers import TensorBoardLogger

            # What an earlier process logged after the checkpoint that this one goes on from is hidden
            purge = None if plan.stage != "fit" or plan.resume is None else step_of(plan.resume) + 1
            version = "tensorboard" if plan.stage == "fit" else f"tensorboard-{plan.stage}"
            trackers.append(TensorBoardLogger(plan.run_dir, name="", version=version, purge_step=purge))
        except ModuleNotFoundError:
            raise ConfigError("logger=tensorboard needs a package: pip install tensorboard") from None
    if plan.logger.name == "wandb":
        trackers.append(build_wandb_logger(plan, without_secrets(record)))
    trackers += [build(node, f"loggers.{name}") for name, node in plan.loggers.items()]
    for tracker in trackers:
        _hide_secrets(tracker)
    return [*trackers, CsvLogger(plan.run_dir, plan.stage)]


def _hide_secrets(tracker: Logger) -> None:
    original = tracker.log_hyperparams

    def log_hyperparams(params: Any, *args: Any, **more: Any) -> None:
        original(without_secrets(vars(params) if isinstance(params, Namespace) else params), *args, **more)

    tracker.log_hyperparams = log_hyperparams  # type: ignore[method-assign]


def without_secrets(value: Any) -> Any:
    """`value` with the keys and passwords of this process's environment taken out of its texts."""
    if isinstance(value, str):
        for name, secret in os.environ.items():
            if _SECRET.search(name) and len(secret) >= 8:
                value = value.replace(secret, "***")
        return value
    if isinstance(value, Mapping):
        return {key: without_secrets(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(item) for item in value]
    return value


_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL")
