"""Puts what the GPUs and hosts of all ranks report into each row, and says when a GPU reports an error."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from lightning.pytorch import Callback, LightningModule, Trainer
from tqdm import tqdm

from shardwise.callbacks.steps import StepLog
from shardwise.distributed.collectives import gather_objects
from shardwise.metrics.energy import Energy
from shardwise.metrics.reading import GpuError
from shardwise.metrics.telemetry import Gpu, Telemetry, build_readers, gpu_of, telemetry_values
from shardwise.plan import Plan
from shardwise.process.console import console
from shardwise.run_dir.events import append_event
from shardwise.strategies.base import strategy_of

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
