"""Builds the loggers of a run: metrics.csv always, W&B, TensorBoard and the user's own on request."""

from __future__ import annotations

import csv
import io
import netrc
import os
import shlex
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_only

from shardwise.config.targets import build, check, locate
from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.run_dir.checkpoints import step_of
from shardwise.run_dir.events import redact
from shardwise.run_dir.files import (
    METRICS,
    WANDB_GONE,
    keep_unless_goes_on,
    partial_path,
    put_in_place,
    read_rows,
    stage_file,
    write_whole,
)


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


# Writes metrics.csv, which has a row for each logged step.


class CsvLogger(Logger):
    """Writes each row to `<run>/metrics.csv` when it is logged, so that a killed run loses none.

    Lightning's CSVLogger deletes the file of the run that it continues. The attributes that modules read from that one
    are here too.
    """

    rows_are_steps = True  # a number that belongs to no step of the run goes to the other loggers only

    def __init__(self, run_dir: str | Path, stage: str = "fit") -> None:
        super().__init__()
        self.path = Path(run_dir) / stage_file(METRICS, stage)
        self._fields: list[str] = []
        # The step that the run goes on from, and the names that are logged for it already
        self._known: tuple[int, set[str]] = -1, set()
        self._is_awaited: Callable[[int], bool] = lambda step: False
        self._last: dict[str, str] = {}  # the last row
        self._last_offset = 0  # where the last row begins in the file
        # step → what callbacks have logged before the step's own row, or what could not be written
        self._waiting: dict[int, dict[str, Any]] = {}
        self._is_torn = False  # whether the last row could not be written, or not all of it

    def wait_for_rows(self, is_awaited: Callable[[int], bool]) -> None:
        """Keep what is logged for a step until its own row comes. `is_awaited(step)`: whether it is to come."""
        self._is_awaited = is_awaited

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return self.path.parent.name

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    log_dir = root_dir = save_dir

    @property
    def experiment(self) -> CsvLogger:
        return self

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        step = 0 if step is None else step
        if self._is_awaited(step):
            self._waiting.setdefault(step, {}).update(metrics)
        else:
            self._append(metrics, step)

    @rank_zero_only
    def log_row(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the step's own row, together with what callbacks have logged for the step before."""
        self._append({**self._waiting.pop(step, {}), **metrics}, step)

    @rank_zero_only
    def release(self) -> None:
        """Write what still waits for a row: the run has ended, and the row does not come."""
        for step in sorted(self._waiting):
            self._append(self._waiting.pop(step), step)

    def _append(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a row. What cannot be written is kept for the next row, and said."""
        earlier = {number: self._waiting.pop(number) for number in sorted(self._waiting) if number < step}
        rows = [*earlier.items(), (step, dict(metrics))]
        while rows:
            try:
                self._append_row(rows[0][1], rows[0][0])
            except OSError as error:
                if not self._is_torn:
                    said = f"{self.path} could not be written: {error.strerror}; the row is kept until it can be"
                    print(said, file=sys.stderr, flush=True)
                self._is_torn = True
                break
            del rows[0]
        for number, row in rows:  # in their order: none before those that could not be written
            self._waiting[number] = {**self._waiting.get(number, {}), **row}

    def _append_row(self, metrics: Mapping[str, float], step: int) -> None:
        if self._is_torn and self.path.exists():
            # Without a row of which only a part was written, or all of it by the second try that closing a file makes
            torn = str(step), self._last.get("step")
            whole = [row for row in read_rows(self.path) if row["step"] not in torn]
            self._write(self._fields, [*whole, self._last] if self._last else whole)
        known = self._known[1] if step == self._known[0] else set()
        row: dict[str, Any] = {**{key: value for key, value in metrics.items() if key not in known}, "step": step}
        if row.keys() <= {"step", "epoch"}:
            return
        if not self._fields and self.path.exists():
            with self.path.open(newline="") as file:
                self._fields = list(csv.DictReader(file).fieldnames or ())
        fields = self._fields or ["step"]
        if new := [key for key in row if key not in self._fields]:
            self._write(fields + [key for key in new if key != "step"], read_rows(self.path))
        joins = str(step) == self._last.get("step") and not (row.keys() & self._last.keys()) - {"step", "epoch"}
        if joins:  # what comes after a step, such as a validation, goes into the step's row
            row = {**row, **self._last}
        self._put(row, joins)
        self._is_torn = False

    def _put(self, row: dict[str, Any], over_the_last: bool) -> None:
        """Write a row in one call, which a kill cannot cut in two. A row that replaces the last one is longer."""
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._fields).writerow(row)
        with self.path.open("r+", newline="") as file:
            self._last_offset = file.seek(self._last_offset) if over_the_last else file.seek(0, os.SEEK_END)
            file.write(text.getvalue())
        self._last = {key: str(value) for key, value in row.items() if value != ""}

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Remove the rows after `step`: a run that goes on from its checkpoint writes them again.

        What the run logs again for `step` itself, such as a validation after the checkpoint, is left out.
        """
        keep_unless_goes_on(self.path, step)
        kept = [row for row in read_rows(self.path) if int(row["step"]) <= step]
        logged = {key for row in kept if int(row["step"]) == step for key, value in row.items() if value}
        self._known = step, logged - {"step", "epoch"}
        if kept:
            self._write(list(kept[0]), kept)
        else:
            self.path.unlink(missing_ok=True)

    @rank_zero_only
    def rename(self, names: dict[str, str]) -> None:
        """Rename columns. `names`: old name → new name."""
        rows = read_rows(self.path)
        if rows:
            self._write(
                [names.get(key, key) for key in rows[0]],
                [{names.get(key, key): value for key, value in row.items()} for row in rows],
            )

    def _write(self, fields: list[str], rows: list[dict[str, str]]) -> None:
        with partial_path(self.path).open("w", newline="") as file:
            writer = csv.DictWriter(file, fields)
            writer.writeheader()
            writer.writerows(rows[:-1])
            self._last_offset = file.tell()
            writer.writerows(rows[-1:])
        self._last = {key: value for key, value in rows[-1].items() if value} if rows else {}
        put_in_place(self.path)
        self._fields = fields

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Write nothing: the launcher writes config.yaml and plan.json."""

    log_hparams = log_hyperparams


# Logs to Weights & Biases. This is the only module that knows wandb.


def build_wandb_logger(plan: Plan, record: dict[str, Any]) -> Logger:
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    metrics = Path(plan.run_dir) / METRICS
    # Names that earlier processes of the run have logged, by step: when this process gets there, it leaves them out.
    logged: dict[int, set[str]] = {}
    for row in read_rows(metrics) if plan.stage == "fit" else []:
        logged.setdefault(int(row["step"]), set()).update(key for key, value in row.items() if value)

    # Rows that W&B has missed: a signal to a whole job ends wandb's own process before the run ends.
    gone = Path(plan.run_dir) / WANDB_GONE
    since = int(gone.read_text()) if plan.stage == "fit" and gone.exists() else None
    missed = [] if since is None else [row for row in read_rows(metrics) if int(row["step"]) >= since]

    class Continued(WandbLogger):
        is_gone = False

        @rank_zero_only
        def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
            if missed:
                for row in missed:
                    values = {key: float(value) for key, value in row.items() if value and key != "step"}
                    self._call(super().log_metrics, values, int(row["step"]))
                missed.clear()
                if not self.is_gone:
                    gone.unlink(missing_ok=True)
            known = logged.get(-1 if step is None else step, set())
            if new := {key: value for key, value in metrics.items() if key not in known}:
                self._call(super().log_metrics, new, step)

        @rank_zero_only
        def leaves(self) -> None:
            self._call(self.experiment.mark_preempting)  # this tells W&B that the run will be started again

        @rank_zero_only
        def tell_verdict(self, name: str, text: str, all_texts: list[str]) -> None:
            """Alert the user, and keep what was told in the run's summary. `text`: of all of them the new one."""

            def tell() -> None:
                self.experiment.alert(title=f"verdict: {name}", text=text)
                self.experiment.summary["verdicts"] = all_texts

            self._call(tell)

        def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
            """Call a function of wandb's, and go on without W&B if its process is gone."""
            if self.is_gone:
                return
            try:
                function(*arguments)
            except (OSError, wandb.Error) as error:
                self.is_gone = True
                message = f"W&B is gone ({type(error).__name__}: {error}): what comes now it gets when the run goes on"
                print(message, flush=True)
                if len(arguments) > 1 and not gone.exists():
                    write_whole(gone, str(arguments[1]))

    run_id = plan.run_id if plan.stage == "fit" else f"{plan.run_id}-{plan.stage}"
    offline = plan.logger.mode == "offline" or (plan.logger.mode == "auto" and not _wandb_reachable())
    os.environ.setdefault("WANDB_SILENT", "true")
    if offline and os.environ.get("RANK", "0") == "0":
        folder = shlex.quote(str(Path(plan.run_dir) / "wandb"))
        print(f"W&B is offline, and writes to {folder}; to upload it: wandb sync {folder}/offline-run-*", flush=True)
    Continued.__name__ = WandbLogger.__name__  # some code compares the name of a logger's class
    logger = Continued(
        project=plan.logger.project,
        entity=plan.logger.entity,
        id=run_id,
        name=run_id,
        save_dir=plan.run_dir,
        offline=offline,
        resume=None if offline else "allow",
        tags=list(plan.logger.tags),
        config=record,
    )
    logger._wandb_init.pop("anonymous", None)  # Lightning always passes it, and wandb warns that it means nothing
    return logger


def _wandb_reachable() -> bool:
    """Whether there is a key, and a server that answers within two seconds; otherwise the run is logged to disk."""
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    if not os.environ.get("WANDB_API_KEY") and not _netrc_knows(host.hostname or ""):
        return False
    try:
        with socket.create_connection((host.hostname or "", host.port or 443), timeout=2):
            return True
    except OSError:
        return False


def _netrc_knows(host: str) -> bool:
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
