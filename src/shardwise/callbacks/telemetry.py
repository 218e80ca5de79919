"""Puts what GPUs and hosts report into each row, and hands the rows to Prometheus where that is asked for."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from tqdm import tqdm

from shardwise.callbacks.saving import Saving
from shardwise.callbacks.steps import StepLog
from shardwise.distributed.mesh import gather_objects
from shardwise.metrics.nvml import GpuError
from shardwise.metrics.prometheus import Exporter, RankLabels
from shardwise.metrics.telemetry import Energy, Gpu, Telemetry, build_readers, gpu_of, telemetry_values
from shardwise.plan import Plan
from shardwise.process.report import console
from shardwise.run_dir.events import append_event
from shardwise.run_dir.files import STARTS, read_json
from shardwise.strategies.base import strategy_of

# Puts what the GPUs and hosts of all ranks report into each row, and says when a GPU reports an error.

_JOULES = "gpu/energy_joules"


class TelemetryLog(Callback):
    """Keeps this rank's telemetry, and on rank 0 the energy of all GPUs."""

    def __init__(self, plan: Plan, log: StepLog) -> None:
        self.plan, self.steps = plan, log
        self.energy = Energy(plan.run_dir)
        self._telemetry: Telemetry | None = None
        self._gpu: Gpu | None = None
        self._trainer: Trainer | None = None
        self.names = telemetry_values(plan.accelerator) if plan.metrics.telemetry else {}
        log.rank_values.add_source(self.names, self._take)
        log.row_listeners.append(self._on_row)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.names:
            return
        self._trainer, self._gpu = trainer, gpu_of(strategy_of(trainer).root_device)
        if trainer.is_global_zero:
            self.energy.read()
        self._telemetry = Telemetry(build_readers(self._gpu), self.plan.metrics.telemetry_seconds, self._on_error)
        self._telemetry.start()

    def _take(self) -> Mapping[str, float]:
        """What was measured since the last row."""
        values = {} if self._telemetry is None else self._telemetry.take()
        self._print_notices()
        return values

    def _print_notices(self) -> None:
        for notice in [] if self._telemetry is None else self._telemetry.take_notices():
            self.steps.write(f"telemetry: {notice}")

    def _on_error(self, error: GpuError) -> None:
        """Record and print an error at once, on the rank that sees it: it may not live until the next row."""
        rank, host = int(os.environ.get("RANK", "0")), os.uname().nodename
        gpu = "" if self._gpu is None else self._gpu.label
        step = None if self._trainer is None else self._trainer.global_step
        text = f"rank {rank} on {host}, {gpu}: {error.text}"
        append_event(self.plan.run_dir, error.kind, step, text, rank=rank, host=host, gpu=gpu, **error.data)
        tqdm.write(f"telemetry: {text}", file=console())

    def _on_row(self, step: int, row: dict[str, float], values: dict[str, list[float]]) -> None:
        if self._trainer is None or not self._trainer.is_global_zero:
            return
        self.energy.add(_total(values, _JOULES), self.steps.meter.weight)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._telemetry is None:
            return
        self._telemetry.stop()
        rest = dict(self._take())
        self._telemetry = None
        if _JOULES not in self.names:
            return
        last = gather_objects(strategy_of(trainer).mesh.group("world"), rest.get(_JOULES, 0.0))
        if trainer.is_global_zero:
            self.energy.add(sum(last), self.steps.meter.weight)
            self.energy.write()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the thread, also when the guard rolls the run back, which makes new callbacks in this process."""
        if self._telemetry is not None:
            self._telemetry.stop()
            self._telemetry = None
            if trainer.is_global_zero:
                self.energy.write()


def _total(values: dict[str, list[float]], name: str) -> float:
    return math.fsum(value for value in values.get(name, []) if not math.isnan(value))


# Hands each row to Prometheus where `metrics.prometheus` asks for it.


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
