"""Where metrics go: metrics.csv always, W&B or TensorBoard when asked. The one module that knows wandb."""

from __future__ import annotations

import csv
import io
import netrc
import os
import re
import shlex
import socket
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_only

from shardwise.build import build, check, locate
from shardwise.checkpoint.find import stage_file, step_of
from shardwise.errors import ConfigError
from shardwise.plan import Plan


def _metrics(run_dir: str | Path) -> Path:
    return Path(run_dir) / "metrics.csv"


class CsvLogger(Logger):
    """Rows in `<run>/metrics.csv`, each written when it is logged, so that a killed run loses none.

    Lightning's own deletes the file of the run it continues. What its users read of it is here too.
    """

    def __init__(self, run_dir: str | Path, stage: str = "fit") -> None:
        super().__init__()
        self.path = Path(run_dir) / stage_file("metrics.csv", stage)
        self._fields: list[str] = []
        self._known: tuple[int, set[str]] = -1, set()  # the step that the run goes on from, and what is logged of it
        self.is_awaited: Callable[[int], bool] = lambda step: False  # whether the step's own row has yet to come
        self._last: dict[str, str] = {}  # the last row, and where it begins
        self._at = 0
        self._held: dict[int, dict[str, Any]] = {}  # what callbacks log for such a step: it goes into that row

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
        if self.is_awaited(step):
            self._held.setdefault(step, {}).update(metrics)
        else:
            self._append(metrics, step)

    @rank_zero_only
    def log_row(self, metrics: Mapping[str, float], step: int) -> None:
        """The step's own row, with what has been logged for the step before."""
        self._append({**self._held.pop(step, {}), **metrics}, step)

    @rank_zero_only
    def release(self) -> None:
        """Write what waits for rows that do not come: the run has ended."""
        for step in sorted(self._held):
            self._append(self._held.pop(step), step)

    def _append(self, metrics: Mapping[str, float], step: int) -> None:
        known = self._known[1] if step == self._known[0] else set()
        row: dict[str, Any] = {**{key: value for key, value in metrics.items() if key not in known}, "step": step}
        if row.keys() <= {"step", "epoch"}:
            return
        if not self._fields and self.path.exists():
            with self.path.open(newline="") as file:
                self._fields = list(csv.DictReader(file).fieldnames or ())
        fields = self._fields or ["step"]
        if new := [key for key in row if key not in self._fields]:
            self._write(fields + [key for key in new if key != "step"], read_metrics(self.path))  # empty in older rows
        joins = str(step) == self._last.get("step") and not (row.keys() & self._last.keys()) - {"step", "epoch"}
        if joins:  # what follows upon a step, a validation say, goes into its row
            row = {**row, **self._last}
        self._put(row, joins)

    def _put(self, row: dict[str, Any], over_the_last: bool) -> None:
        """In one write, which a kill cannot cut in two; a row that takes another's place is longer than that."""
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._fields).writerow(row)
        with self.path.open("r+", newline="") as file:
            self._at = file.seek(self._at) if over_the_last else file.seek(0, os.SEEK_END)
            file.write(text.getvalue())
        self._last = {key: str(value) for key, value in row.items() if value != ""}

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Forget what came after `step`: a run that goes on from its checkpoint comes there again. What it logs of
        `step` itself once more, a validation behind the checkpoint say, is there already."""
        kept = [row for row in read_metrics(self.path) if int(row["step"]) <= step]
        logged = {key for row in kept if int(row["step"]) == step for key, value in row.items() if value}
        self._known = step, logged - {"step", "epoch"}
        if kept:
            self._write(list(kept[0]), kept)
        else:
            self.path.unlink(missing_ok=True)

    @rank_zero_only
    def rename(self, names: dict[str, str]) -> None:
        """Columns, of old name to new."""
        rows = read_metrics(self.path)
        if rows:
            self._write(
                [names.get(key, key) for key in rows[0]],
                [{names.get(key, key): value for key, value in row.items()} for row in rows],
            )

    def _write(self, fields: list[str], rows: list[dict[str, str]]) -> None:
        self._fields = fields
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, fields)
            writer.writeheader()
            writer.writerows(rows[:-1])
            self._at = file.tell()
            writer.writerows(rows[-1:])
        self._last = {key: value for key, value in rows[-1].items() if value} if rows else {}
        os.replace(temporary, self.path)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """config.yaml and plan.json are written by the launcher."""

    log_hparams = log_hyperparams


def read_metrics(path: Path) -> list[dict[str, str]]:
    """Rows of a metrics.csv; an empty list when there is none. A last row that a kill cut short is left out."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        whole = [line for line in file if line.endswith("\n")]
    return list(csv.DictReader(whole))


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
        trackers.append(_wandb(plan, without_secrets(record)))
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


def _wandb(plan: Plan, record: dict[str, Any]) -> Logger:
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    # What the run's earlier processes have logged and this one comes to again: once is enough, and it is the same.
    logged: dict[int, set[str]] = {}
    for row in read_metrics(_metrics(plan.run_dir)) if plan.stage == "fit" else []:
        logged.setdefault(int(row["step"]), set()).update(key for key, value in row.items() if value)

    # What it has missed, if its own process was gone before the run: the signal to a whole job ends it at once.
    gone = Path(plan.run_dir) / "wandb-gone"
    since = int(gone.read_text()) if plan.stage == "fit" and gone.exists() else None
    missed = [] if since is None else [row for row in read_metrics(_metrics(plan.run_dir)) if int(row["step"]) >= since]

    class Continued(WandbLogger):
        is_gone = False

        @rank_zero_only
        def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
            if missed:
                for row in missed:
                    values = {key: float(value) for key, value in row.items() if value and key != "step"}
                    self._tell(super().log_metrics, values, int(row["step"]))
                missed.clear()
                if not self.is_gone:
                    gone.unlink(missing_ok=True)
            known = logged.get(-1 if step is None else step, set())
            if new := {key: value for key, value in metrics.items() if key not in known}:
                self._tell(super().log_metrics, new, step)

        @rank_zero_only
        def leaves(self) -> None:
            self._tell(self.experiment.mark_preempting)  # W&B's word for: it will be run again

        def _tell(self, function: Callable[..., Any], *words: Any) -> None:
            """A tracker that is gone does not take the run with it."""
            if self.is_gone:
                return
            try:
                function(*words)
            except (OSError, wandb.Error) as error:
                self.is_gone = True
                told = f"W&B is gone ({type(error).__name__}: {error}): what comes now it gets when the run goes on"
                print(told, flush=True)
                if len(words) > 1 and not gone.exists():
                    gone.write_text(str(words[1]))

    run_id = plan.run_id if plan.stage == "fit" else f"{plan.run_id}-{plan.stage}"
    offline = plan.logger.mode == "offline" or (plan.logger.mode == "auto" and not _wandb_reachable())
    os.environ.setdefault("WANDB_SILENT", "true")
    if offline and os.environ.get("RANK", "0") == "0":
        folder = shlex.quote(str(Path(plan.run_dir) / "wandb"))
        print(f"W&B is offline, and writes to {folder}; to upload it: wandb sync {folder}/offline-run-*", flush=True)
    Continued.__name__ = WandbLogger.__name__  # code that asks a logger for the name of its class
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
    """A key and a server that answers within two seconds; without them the run is logged to disk."""
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
