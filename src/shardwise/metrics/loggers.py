"""Builds the loggers of a run: metrics.csv always, W&B, TensorBoard and the user's own on request."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger

from shardwise.config.targets import build, check, locate
from shardwise.errors import ConfigError
from shardwise.metrics.csv_logger import CsvLogger
from shardwise.metrics.wandb_logger import build_wandb_logger
from shardwise.plan import Plan
from shardwise.run_dir.checkpoints import step_of
from shardwise.run_dir.secrets import redact


def check_loggers(plan: Plan) -> None:
    """Locate the user's own trackers and check their arguments, without building them.

    Raises:
        ConfigError: a target is no Logger class, or does not take one of its arguments.
    """
    for name, node in plan.loggers.items():
        key = f"loggers.{name}"
        target = locate(node["_target_"], key)
        if not (isinstance(target, type) and issubclass(target, Logger)):
            raise ConfigError(
                f"{key}._target_={node['_target_']} is no logger class: give a subclass of "
                f"lightning.pytorch.loggers.Logger"
            )
        check(node, key)


def build_loggers(plan: Plan, record: dict[str, Any]) -> list[Logger]:
    """Build the loggers: the tracker of `logger=`, then the user's own, then metrics.csv.

    A module's `self.logger` is the first one. Stages other than fit log to files and tracker runs of their own.
    `record`: the Plan and the environment, which trackers keep with the run.
    """
    if plan.quick_check:  # a module may use a tracker, and the dummy logs nothing
        return [DummyLogger(), CsvLogger(plan.run_dir, plan.stage)]
    trackers: list[Logger] = []
    if plan.logger.name == "tensorboard":
        try:
            # Hide what an earlier process logged after the checkpoint that this one goes on from
            purge = None if plan.stage != "fit" or plan.resume is None else step_of(plan.resume) + 1
            version = "tensorboard" if plan.stage == "fit" else f"tensorboard-{plan.stage}"
            trackers.append(TensorBoardLogger(plan.run_dir, name="", version=version, purge_step=purge))
        except ModuleNotFoundError:
            raise ConfigError("logger=tensorboard needs a package: pip install tensorboard") from None
    if plan.logger.name == "wandb":
        trackers.append(build_wandb_logger(plan, redact(record)))
    trackers += [build(node, f"loggers.{name}") for name, node in plan.loggers.items()]
    for tracker in trackers:
        _hide_secrets(tracker)
    return [*trackers, CsvLogger(plan.run_dir, plan.stage)]


def tell_verdict(logger: Logger, name: str, text: str, all_texts: list[str], step: int) -> None:
    """Hand a verdict to a tracker that takes texts: W&B as an alert, TensorBoard as a text of this step.

    `text`: the verdict in words, the newest of `all_texts`.
    """
    if hasattr(logger, "tell_verdict"):
        logger.tell_verdict(name, text, all_texts)
    elif isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text(f"verdict/{name}", text, step)


def _hide_secrets(tracker: Logger) -> None:
    original = tracker.log_hyperparams

    def log_hyperparams(params: Any, *args: Any, **more: Any) -> None:
        original(redact(vars(params) if isinstance(params, Namespace) else params), *args, **more)

    tracker.log_hyperparams = log_hyperparams  # type: ignore[method-assign]
