"""Logs to Weights & Biases. This is the only module that knows wandb."""

from __future__ import annotations

import netrc
import os
import shlex
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from shardwise.plan import Plan
from shardwise.run_dir.files import METRICS, WANDB_GONE, write_whole
from shardwise.run_dir.rows import read_rows


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
