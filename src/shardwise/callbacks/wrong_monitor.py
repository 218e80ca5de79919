"""What ends a run whose `checkpoint.monitor` is not among the metrics of its validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwise.errors import CheckpointError, ConfigError
from shardwise.plan import Plan


def wrong_monitor(plan: Plan, monitor: str, measured: Mapping[str, float], save: Callable[[], str]) -> ConfigError:
    """The error, after `save` has saved what was trained and said so. Collective, as `save` is.

    `measured`: the metrics of this rank; another one may lack the one to monitor.
    """
    why = "validation does not log it on every rank; log it on all"
    if monitor not in measured:
        why = f"validation logs {', '.join(measured) or 'nothing'}; monitor one of these"
    saved = ""
    if plan.checkpoint.saves:
        try:
            saved = f"; {save()}"  # and `process/report.py` says how the run goes on
        except CheckpointError as error:  # the first mistake is the one to mend
            saved = f"; {error}"
    return ConfigError(f"checkpoint.monitor={monitor}: {why}, or give checkpoint.monitor=null{saved}")
