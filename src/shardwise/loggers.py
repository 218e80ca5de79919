"""Where metrics go: metrics.csv always, W&B or TensorBoard when asked. The one module that knows wandb."""

from __future__ import annotations

import csv
import netrc
import os
import socket
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from shardwise.errors import ConfigError
from shardwise.plan import Plan


def _metrics(run_dir: str | Path) -> Path:
    return Path(run_dir) / "metrics.csv"


class CsvLogger(Logger):
    """Rows in `<run>/metrics.csv`, each written when it is logged, so that a killed run loses none.

    Lightning's own deletes the file of the run it continues.
    """

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__()
        self.path = _metrics(run_dir)
        self._fields: list[str] = []

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return self.path.parent.name

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row: dict[str, Any] = {"step": 0 if step is None else step, **metrics}
        if not self._fields and self.path.exists():
            with self.path.open(newline="") as file:
                self._fields = list(csv.DictReader(file).fieldnames or ())
        if new := [key for key in row if key not in self._fields]:
            self._write(self._fields + new, read_metrics(self.path))  # older rows leave a new column empty
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._fields).writerow(row)

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Forget what came after `step`: a run that goes on from its checkpoint comes there again."""
        if kept := [row for row in read_metrics(self.path) if int(row["step"]) <= step]:
            self._write(list(kept[0]), kept)
        else:
            self.path.unlink(missing_ok=True)

    @rank_zero_only
    def forget_validation(self, step: int) -> None:
        """Of this step: it will be run again."""
        rows = read_metrics(self.path)
        kept = [row for row in rows if int(row["step"]) != step or any(row[k] for k in row if k.startswith("train/"))]
        if len(kept) < len(rows):
            self._write(list(rows[0]), kept)

    def _write(self, fields: list[str], rows: list[dict[str, str]]) -> None:
        self._fields = fields
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, fields)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, self.path)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """config.yaml and plan.json are written by the launcher."""


def read_metrics(path: Path) -> list[dict[str, str]]:
    """Rows of a metrics.csv; an empty list when there is none. A last row that a kill cut short is left out."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        whole = [line for line in file if line.endswith("\n")]
    return list(csv.DictReader(whole))


def build_loggers(plan: Plan, record: dict[str, Any]) -> list[Logger]:
    """The CSV logger and the one that was asked for; none where nothing is trained: it would add to the run's curves.

    `record`: Plan and environment, kept with the run.
    """
    if plan.stage != "fit":
        return []
    loggers: list[Logger] = [CsvLogger(plan.run_dir)]
    if plan.logger.name == "tensorboard":
        try:
            from lightning.pytorch.loggers import TensorBoardLogger

            loggers.append(TensorBoardLogger(plan.run_dir, name="", version="tensorboard"))
        except ModuleNotFoundError:
            raise ConfigError("logger=tensorboard needs a package: pip install tensorboard") from None
    if plan.logger.name == "wandb":
        loggers.append(_wandb(plan, record))
    return loggers


def _wandb(plan: Plan, record: dict[str, Any]) -> Logger:
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    # What the run's earlier processes have logged and this one comes to again: once is enough, and it is the same.
    logged: dict[int, set[str]] = {}
    for row in read_metrics(_metrics(plan.run_dir)):
        logged.setdefault(int(row["step"]), set()).update(key for key, value in row.items() if value)

    # What it has missed, if its own process was gone before the run: the signal to a whole job ends it at once.
    gone = Path(plan.run_dir) / "wandb-gone"
    since = int(gone.read_text()) if gone.exists() else None
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

    offline = plan.logger.mode == "offline" or (plan.logger.mode == "auto" and not _wandb_reachable())
    os.environ.setdefault("WANDB_SILENT", "true")
    logger = Continued(
        project=plan.logger.project,
        entity=plan.logger.entity,
        id=plan.run_id,
        name=plan.run_id,
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
