"""Logs each step's numbers, and shows them as a progress bar in a terminal or as lines elsewhere."""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from tqdm import tqdm

from shardwise.callbacks.configured import refuse_callbacks
from shardwise.lightning_internals.loops import run_length
from shardwise.lightning_internals.results import step_logging, step_results, validation_results
from shardwise.metrics.loggers import CsvLogger
from shardwise.metrics.meter import SPENT, Gathered, Meter, RanksCsv, RankValues, Sums
from shardwise.plan import Plan
from shardwise.protocols import loss_weight_unit_of
from shardwise.run_dir.events import append_event
from shardwise.step.record import LAG, Readback, StepNumbers, StepRecord
from shardwise.strategies.base import strategy_of

# Gets the step, its row, and the numbers of all ranks: name → one number a rank, or NaN
RowListener = Callable[[int, dict[str, float], dict[str, list[float]]], None]
LOSS, OTHER_LOSS = "train/loss", "train/global_batch_loss"


class StepLog(Callback):
    """Logs `train/loss` (mean over the global batch), the gradient norm, learning rate, position and speed.

    The guard hands it each step once its numbers have come from the device; `flush` writes the rows that still wait.
    """

    ends_step = True  # it is called after every other callback and the module: see lightning_internals/hooks.py

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.meter = Meter(plan)
        self.bar: tqdm[Any] | None = None
        self.total: int | None = None  # steps of the run; None: not known
        self.steps = 0  # the steps that this process has made
        self.recompilations = Recompilations(plan.compile.name)
        self._shown: dict[int, tuple[list[str], Readback]] = {}  # step → what the module logs for the progress bar
        self._rows: deque[tuple[int, dict[str, float], Gathered]] = deque()
        self._of_module: dict[int, Logged] = {}  # step that gets a row → what the module logged in it
        self._taken: set[str] = set()  # the names that the module logs under
        self._written: set[str] = set()  # the names of the run's own values
        self._last_step = 0
        self._row_step = 0  # the step of the last row
        self.rank_values = RankValues()
        self.row_listeners: list[RowListener] = []  # called on every rank for each row
        self.more_texts: list[Callable[[], dict[str, str]]] = []  # what others show in the progress bar
        self.ranks_csv: RanksCsv | None = None  # rank 0 writes it
        self._waited = 0.0  # the share of the time since the last row in which this rank waited for data
        self.rank_values.add_source({"train/data_wait": "largest"}, lambda: {"train/data_wait": self._waited})

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        refuse_callbacks(trainer.callbacks)  # type: ignore[attr-defined] # now the module's are among them
        # There is one progress bar: the user's own, where there is one
        self.shows_bar = self.plan.progress_bar and trainer.progress_bar_callback is None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, CsvLogger):
                logger.rewind(trainer.global_step)
                logger.wait_for_rows(partial(self._is_awaited, trainer))
        if trainer.is_global_zero:
            self.meter.on_start()
            self.ranks_csv = RanksCsv(self.plan.run_dir)
            self.ranks_csv.rewind(trainer.global_step)
            self.total = run_length(trainer)
            append_event(
                self.plan.run_dir, "start", trainer.global_step, "training starts", resume=self.plan.resume,
                steps=self.total,
            )  # fmt: skip
        self._row_step = trainer.global_step
        self._last_step = trainer.global_step
        step_logging(trainer).between_steps(trainer.global_step)
        step_logging(trainer).call_with_names(partial(self._claim, trainer))
        if trainer.is_global_zero and self.shows_bar:
            self.bar = tqdm(total=self.total, initial=trainer.global_step, unit="step", dynamic_ncols=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if (batch_idx + 1) % self.plan.accumulate_grad_batches:
            return
        step_results(trainer).drop_window()
        step_logging(trainer).between_steps(step)
        if step == self._last_step:
            return
        self._last_step = step
        self.steps += 1
        if self.bar is not None:
            self.bar.n = step
            self.bar.update(0)
        if self.plan.compile.name != "none":
            self.recompilations.after_step(warns=trainer.is_global_zero)

    def add_step(self, trainer: Trainer, step: StepRecord, numbers: StepNumbers) -> None:
        """Add the next step. Collective."""
        self.meter.add(step, numbers.loss_weight, numbers.flops)
        while self._rows and self._rows[0][0] <= step.number - LAG:
            self._write_row(trainer)
        if not step_logging(trainer).logs(step.number):
            return
        strategy = strategy_of(trainer)
        assert strategy.lightning_module is not None
        row = {"train/samples": float(step.start + self.plan.global_batch_size)}
        if step.losses:  # a module that optimizes by hand need not return a loss
            row["train/loss"] = numbers.loss
        if strategy.lightning_module.automatic_optimization:
            row["train/gradient_norm"] = numbers.gradient_norm
        if step.loss_scale is not None:
            row |= {
                "train/loss_scale": step.loss_scale,
                "train/skipped_steps": float(strategy.step.verdict.skipped_steps),
            }
        row["train/learning_rate"] = step.learning_rate
        if strategy.train_loader is not None:
            row |= strategy.train_loader.progress(step.start + self.plan.global_batch_size)
        sums = self.meter.take_interval()
        row |= self._speeds(strategy.lightning_module, sums)
        row |= {SPENT: self.meter.training_seconds, "train/goodput": self.meter.goodput}
        self._waited = sums.waiting_seconds / max(sums.seconds, 1e-9) if sums.steps else float("nan")
        gathered = self.rank_values.gather(strategy.mesh, strategy.root_device)
        self._rows.append((step.number, row, gathered))
        if trainer.world_size == 1:
            self.flush(trainer)

    def collect(self, trainer: Trainer, step: int) -> None:
        """Start to copy from the device what the module has logged in the step that has just ended."""
        if step_logging(trainer).logs(step):
            results = step_results(trainer)
            self._claim(trainer, results.names())
            window = results.end_window()
            self._of_module[step] = Logged(window, trainer.current_epoch)
            if shown := results.for_progress_bar(window):
                self._shown[step] = list(shown), Readback(torch.stack([_exact(v) for v in shown.values()]))

    def flush(self, trainer: Trainer) -> None:
        """Write every row, and wait for numbers that are still being copied."""
        while self._rows:
            self._write_row(trainer)

    def _speeds(self, module: LightningModule, sums: Sums) -> dict[str, float]:
        if not sums.steps:  # all steps since the last row were profiled
            return {}
        seconds = max(sums.seconds, 1e-9)
        speeds = {
            "train/step_seconds": seconds / sums.steps,
            "train/samples_per_second": sums.steps * self.plan.global_batch_size / seconds,
        }
        if sums.weight:
            speeds[f"train/{loss_weight_unit_of(module)}_per_second"] = sums.weight / seconds
        if (mfu := self.meter.mfu(sums)) is not None:
            speeds["train/mfu"] = mfu
        return speeds

    def _write_row(self, trainer: Trainer) -> None:
        step, row, gathered = self._rows.popleft()
        self._row_step = step
        values = gathered.read()
        row |= self.rank_values.row(values)
        if self.ranks_csv is not None:
            self.ranks_csv.append(step, values)
        for listen in self.row_listeners:
            listen(step, row, values)
        self._written.update(row)
        whole = {_untaken(key, self._taken): value for key, value in row.items()}
        logged = self._of_module.pop(step, None)
        own = {} if logged is None else logged.read()
        if "step" in own:  # by Lightning's rule, a module may log its values under a step that it counts itself
            self._log(trainer, own, int(own.pop("step")))
        else:
            whole |= own
        self._log(trainer, whole, step)
        self._show(trainer, step, row)

    def _is_awaited(self, trainer: Trainer, step: int) -> bool:
        logging = step_logging(trainer)
        return self._row_step < step <= logging.number and logging.logs(step)

    def _claim(self, trainer: Trainer, names: Collection[str]) -> None:
        """Leave the module the names that it logs under: rename the run's columns of the same names, in all rows."""
        new = self._written.intersection(names) - self._taken
        self._taken.update(names)
        for logger in trainer.loggers:
            if new and isinstance(logger, CsvLogger):
                logger.rename({key: _untaken(key, new) for key in new})

    def _log(self, trainer: Trainer, row: dict[str, float], step: int) -> None:
        for logger in trainer.loggers:
            logger.log_row(row, step) if isinstance(logger, CsvLogger) else logger.log_metrics(row, step)

    def _show(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        if not trainer.is_global_zero:
            return
        shown = {"loss": "train/loss", "gradient norm": "train/gradient_norm", "learning rate": "train/learning_rate"}
        texts = {label: f"{metrics[key]:.4g}" for label, key in shown.items() if key in metrics}
        if step in self._shown:
            names, values = self._shown.pop(step)
            texts |= {name: f"{value:.4g}" for name, value in zip(names, values.read(), strict=True)}
        speeds = {
            key.removeprefix("train/"): value
            for key, value in metrics.items()
            if key.startswith("train/") and key.endswith("_per_second")
        }
        for name, speed in list(speeds.items())[-1:]:  # of a profiled step there is none
            texts[name.replace("_per_second", "/s")] = f"{speed:,.0f}"
        if "train/mfu" in metrics:
            texts["MFU"] = f"{metrics['train/mfu']:.1%}"
        if metrics.get("train/data_wait", 0.0) >= 0.01:
            texts["waiting for data"] = f"{metrics['train/data_wait']:.0%}"
        for more in self.more_texts:
            texts |= more()
        if self.bar is not None:
            self.bar.set_postfix(texts)
        else:
            of = "" if self.total is None else f"/{self.total}"
            if (self.total or 0) > step and "train/step_seconds" in metrics:  # the bar shows this by itself
                left = round(metrics["train/step_seconds"] * ((self.total or 0) - step))
                texts["left"] = str(timedelta(seconds=left))
            print(f"step {step}{of}  " + "  ".join(f"{k} {v}" for k, v in texts.items()), flush=True)

    def write(self, text: str) -> None:
        """Print a line without breaking the progress bar."""
        tqdm.write(text) if self.bar is not None else print(text, flush=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        self.recompilations.expect()
        strategy_of(trainer).step.recorder.restart_clock()
        measured = _scalars(validation_results(trainer))
        if trainer.is_global_zero and measured:
            self.write(f"step {trainer.global_step}  " + "  ".join(f"{k} {digits(v)}" for k, v in measured.items()))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, CsvLogger):
                logger.release()
        if self.bar is not None:
            self.bar.close()


class Logged:
    """What the module logged in a step, while it is copied from the device."""

    def __init__(self, values: dict[str, Tensor], epoch: int) -> None:
        self.epoch = epoch
        self.on_host = {name: float(value) for name, value in values.items() if value.device.type == "cpu"}
        self.names = [name for name in values if name not in self.on_host]
        on_device = [_exact(values[name]) for name in self.names]
        self.readback = Readback(torch.stack(on_device)) if on_device else None

    def read(self) -> dict[str, float]:
        """The logged values, with Lightning's `epoch` if there are any."""
        values = self.on_host | dict(zip(self.names, self.readback.read() if self.readback else [], strict=True))
        return values | {"epoch": float(self.epoch)} if values else {}


def _untaken(key: str, taken: set[str]) -> str:
    """The name of one of the run's values: another than `key` if the module logs under that."""
    if key not in taken:
        return key
    return OTHER_LOSS if key == LOSS else key.replace("train/", "shardwise/", 1)


def validation_metrics(trainer: Trainer) -> dict[str, float]:
    """The scalars that the last evaluation has logged."""
    return {key: value for key, value in _scalars(trainer.callback_metrics).items() if not key.startswith("train/")}


def final_metrics(trainer: Trainer, rows: list[dict[str, str]]) -> dict[str, float]:
    """The scalars of the last evaluation and of the last epoch.

    A value that training logged in its steps is taken from the last row of metrics.csv that has one, since
    `trainer.callback_metrics` has that of the last micro-batch.
    """
    of_steps = step_results(trainer).step_names()
    found: dict[str, float | None] = {
        key: last_of(rows, key) if key in of_steps else value for key, value in validation_metrics(trainer).items()
    }
    return {key: value for key, value in found.items() if value is not None}


def last_of(rows: list[dict[str, str]], key: str) -> float | None:
    """The last value of a column of metrics.csv."""
    values = [row[key] for row in rows if row.get(key)]
    return float(values[-1]) if values else None


def _exact(value: Tensor) -> Tensor:
    return value.reshape(()).to(torch.float64)


def digits(value: float) -> str:
    """A number with four decimals, or with four significant digits if it is small."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.01 else f"{value:.4g}"


def _scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items() if value.numel() == 1}


# Counts the graphs that are compiled while training, and says why if they are many.

_HANDFUL = 5  # with more compilations than this after the first step, the run warns
_NAMED = 3  # so many causes are named


class Recompilations:
    """Called after each step. The first step and evaluation compile graphs of their own, which do not count."""

    def __init__(self, scope: str) -> None:
        self.scope = scope  # the value of compile=
        self.count = 0
        self.graphs = 0  # compiled so far
        self._expected = True
        self._known: set[str | None] = set()  # the compilations whose causes do not count
        self._causes: Counter[str] = Counter()

    def expect(self) -> None:
        """Do not count what has been compiled since the last step: an evaluation ran."""
        self._expected = True

    def after_step(self, *, warns: bool) -> None:
        """`warns`: whether this rank tells the user."""
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        new, self.graphs = graphs - self.graphs, graphs
        is_expected, self._expected = self._expected, False
        if new <= 0:
            return
        compilations = [m for m in torch._dynamo.utils.get_compilation_metrics() if m.compile_id not in self._known]
        self._known.update(m.compile_id for m in compilations)
        if is_expected:
            return
        self._causes.update(cause for m in compilations if (cause := _cause(m)) is not None)
        before, self.count = self.count, self.count + new
        if warns and before <= _HANDFUL < self.count:
            warnings.warn(self._message(), stacklevel=2)

    def _message(self) -> str:
        most = self._causes.most_common(_NAMED)
        named = (f"{cause} ({times} times)" if times > 1 else cause for cause, times in most)
        causes = "; ".join(named) or "torch does not say what; TORCH_LOGS=recompiles may"
        return (
            f"compile={self.scope}: {self.count} graphs were compiled after the first step, each in seconds, because "
            f"something changes from step to step: {causes}. Keep it the same, or use compile=none"
        )


def _cause(compilation: Any) -> str | None:
    """Which function was compiled again, and which guard failed. None: a backward pass, which follows its forward."""
    if compilation.co_name is None:
        return None
    where = f"{compilation.co_name} ({Path(compilation.co_filename or '').name}:{compilation.co_firstlineno})"
    if compilation.recompile_reason is None:
        return f"{where} ran for the first time"
    reason = compilation.recompile_reason.splitlines()[0]
    return f"{where}: {reason.partition(': ')[2] or reason}"  # without the number of the compilation
