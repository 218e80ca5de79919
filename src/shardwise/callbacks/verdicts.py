"""Tells what holds a run back: on the screen, in events.jsonl, in the progress bar, in summary.json and to trackers."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.callbacks.steps import StepLog
from shardwise.distributed.mesh import gather_objects
from shardwise.metrics.loggers import tell_verdict
from shardwise.metrics.meter import HostTiming
from shardwise.metrics.verdict_rules import RULES, sizes_that_miss
from shardwise.metrics.verdicts import Circumstances, Judge, Place, Size, Verdict
from shardwise.plan import Plan
from shardwise.run_dir.events import append_event
from shardwise.run_dir.files import profile_summaries, read_json
from shardwise.strategies.base import strategy_of


class Verdicts(Callback):
    """Lets every rank report its times, and rank 0 judge them at each row."""

    def __init__(self, plan: Plan, step_log: StepLog) -> None:
        self.plan, self.step_log = plan, step_log
        self.timing = HostTiming(plan.accelerator, step_log.rank_values)
        self.judge: Judge | None = None  # rank 0 has one
        self._sizes: tuple[Size, ...] = ()
        self._trainer: Trainer | None = None
        # The share of a step that is communication which nothing hides, by the run's last profile on a GPU
        self.exposed_communication: float | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero:
            self._sizes = sizes_that_miss(pl_module, self.plan)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = strategy_of(trainer)
        self.timing.begin(strategy.step.recorder.times, strategy.root_device)
        gpu = None if self.plan.accelerator == "cpu" else f"GPU {trainer.local_rank}"
        places = gather_objects(strategy.mesh.group("world"), (socket.gethostname(), gpu))
        if trainer.is_global_zero:
            run = Circumstances(
                self.plan, tuple(Place(*place) for place in places), strategy.units.total,
                bool(strategy.units.modules), self._sizes,
            )  # fmt: skip
            self.read_profile()
            self._trainer, self.judge = trainer, Judge(run, RULES)
            self.step_log.row_listeners.append(self._on_row)
            self.step_log.more_texts.append(self._text)
            self._tell(trainer.global_step, self.judge.begin())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.timing.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.timing.end()

    @property
    def told(self) -> list[Verdict]:
        """Everything that was told, the newest last."""
        return [] if self.judge is None else list(self.judge.told.values())

    @property
    def lines(self) -> dict[str, str]:
        """What the table at the end says: for each kind of verdict what helps, and on which rank."""
        lines: dict[str, list[str]] = {}
        for verdict in self.told:
            where = "" if self.judge is None or verdict.rank is None else self.judge.circumstances.where(verdict.rank)
            lines.setdefault(f"verdict: {verdict.name}", []).append(f"{where}: {verdict.remedy}".removeprefix(": "))
        return {name: "; ".join(dict.fromkeys(remedies)) for name, remedies in lines.items()}

    def _on_row(self, step: int, row: dict[str, float], values: dict[str, list[float]]) -> None:
        assert self.judge is not None
        self._tell(step, self.judge.add(step, values, self.exposed_communication))

    def _tell(self, step: int, verdicts: list[Verdict]) -> None:
        assert self._trainer is not None
        for verdict in verdicts:
            self.step_log.write(f"verdict: {verdict.text}")
            append_event(self.plan.run_dir, "verdict", step, verdict.text, **as_json(verdict, self.judge))
            for logger in self._trainer.loggers:
                tell_verdict(logger, verdict.name, verdict.text, [one.text for one in self.told], step)

    def _text(self) -> dict[str, str]:
        """What the progress bar shows."""
        assert self.judge is not None
        names = dict.fromkeys(one.name for one in self.judge.in_force)
        return {"verdict": ", ".join(names)} if names else {}

    def read_profile(self) -> None:
        """Take what the run's last profile says, if it has one. Rank 0 calls this from any thread when one is there."""
        paths = profile_summaries(self.plan.run_dir)
        self.exposed_communication = _exposed_share(paths[-1]) if paths else None


def as_json(verdict: Verdict, judge: Judge | None = None) -> dict[str, Any]:
    """A verdict as events.jsonl and summary.json have it."""
    place = None if judge is None or verdict.rank is None else judge.circumstances.places[verdict.rank]
    return {
        "name": verdict.name,
        "cause": verdict.cause or None,
        "rank": verdict.rank,
        "host": place.host if place else None,
        "gpu": place.gpu if place else None,
        "sentence": verdict.sentence,
        "remedy": verdict.remedy,
        "numbers": dict(verdict.numbers),
        "note": verdict.is_note,
    }


def _exposed_share(path: Path) -> float | None:
    try:
        content = read_json(path)
        step = content["step"]
        return None if content["is_cpu"] else float(step["exposed_communication_ms"] / step["span_ms"])
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return None
