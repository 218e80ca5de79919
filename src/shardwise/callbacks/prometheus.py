"""Hands each row to Prometheus where `metrics.prometheus` asks for it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.callbacks.saving import Saving
from shardwise.callbacks.steps import StepLog
from shardwise.callbacks.telemetry import TelemetryLog
from shardwise.distributed.collectives import gather_objects
from shardwise.metrics.prometheus import Exporter, RankLabels
from shardwise.metrics.telemetry import gpu_of
from shardwise.plan import Plan
from shardwise.run_dir.files import STARTS
from shardwise.run_dir.reading import read_json
from shardwise.strategies.base import strategy_of


class PrometheusExport(Callback):
    """Keeps the exporter, on rank 0."""

    def __init__(self, plan: Plan, log: StepLog, telemetry: TelemetryLog, saving: Saving) -> None:
        self.plan, self.steps, self.telemetry, self.saving = plan, log, telemetry, saving
        self.exporter: Exporter | None = None
        self._restarts = 0
        if plan.metrics.prometheus != "none":
            log.row_listeners.append(self._on_row)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.plan.metrics.prometheus == "none":
            return
        gpu = gpu_of(strategy_of(trainer).root_device)
        own = RankLabels(os.uname().nodename, "" if gpu is None else gpu.label)
        ranks = gather_objects(strategy_of(trainer).mesh.group("world"), own)
        if not trainer.is_global_zero:
            return
        with suppress(OSError, ValueError):
            # A run that the guard rolled back starts again in the same process
            self._restarts = len(set(read_json(Path(self.plan.run_dir) / STARTS))) - 1
        exporter = Exporter(self.plan, ranks)
        try:
            self.steps.write(f"prometheus: {exporter.start()}")
            self.exporter = exporter
        except OSError as error:
            self.steps.write(f"prometheus: the run goes on without it: {exporter.why_not(error)}")

    def _on_row(self, step: int, row: dict[str, float], values: dict[str, list[float]]) -> None:
        if self.exporter is None:
            return
        more = {"step": float(step), "saves": float(self.saving.saves), "restarts": float(self._restarts),
                "row time": time.time()}  # fmt: skip
        if joules := self.telemetry.energy.joules:
            more["energy"] = joules
        self.exporter.update(row | more, values)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.exporter is not None:
            self.exporter.stop()
            self.exporter = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)
